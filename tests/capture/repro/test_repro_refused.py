"""Broken, foreign and truncated repro files get one line that names the place."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from apsched.capture.repro.reader import read_repro
from apsched.errors import InputError

DATA = Path(__file__).parent / "data"
WRITE = Callable[..., Path]
WAIT = "w = torch.ops._c10d_functional.wait_tensor.default(c)\nreturn (w,)"
STORAGE = "buf0 = reader.storage(None, 512)\n"
BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "unknown operator": (
        {"body": "x = torch.ops.my_lib.my_op.default(primals_1)\nreturn (x,)"},
        r":8: .*torch\.ops\.my_lib\.my_op\.default, which torch",
    ),
    "unknown overload": (
        {"body": "x = torch.ops.aten.relu.nonsense(primals_1)\nreturn (x,)"},
        r":8: .*aten\.relu\.nonsense",
    ),
    "no overload": (
        {"body": "x = torch.ops.aten.add(primals_1, 1)\nreturn (x,)"},
        r":8: .*without its overload",
    ),
    "unknown higher-order operator": (
        {"body": "x = torch.ops.higher_order.nope(primals_1)\nreturn (x,)"},
        r":8: .*higher_order\.nope",
    ),
    "call of the system": (
        {"body": "x = os.system('true')\nreturn (x,)"},
        r":8: .*a call of os\.system",
    ),
    "call of a torch function": (
        {"body": "x = torch.load('file')\nreturn (x,)"},
        r":8: .*a call of torch\.load",
    ),
    "private path under torch.ops": (
        {"body": "x = torch.ops.aten.__class__.__init__(primals_1)\nreturn (x,)"},
        r":8: .*torch\.ops\.aten\.__class__",
    ),
    "method call": (
        {"body": "x = primals_1.relu()\nreturn (x,)"},
        r":8: .*primals_1\.relu.*before AOTAutograd",
    ),
    "module call": (
        {"body": "x = self.linear(primals_1)\nreturn (x,)"},
        r":8: .*self\.linear.*before AOTAutograd",
    ),
    "control flow": (
        {"body": "if primals_1:\n    return 1\nreturn (primals_1,)"},
        r":8: .*'if primals_1:'",
    ),
    "unknown name": (
        {"body": "x = torch.ops.aten.relu.default(primals_2)\nreturn (x,)"},
        r":8: .*the name primals_2, which no line before",
    ),
    "use after free": (
        {
            "body": (
                "x = torch.ops.aten.relu.default(primals_1);  primals_1 = None\nreturn (primals_1,)"
            )
        },
        r":9: .*primals_1 after its last use",
    ),
    "no return": ({"body": "x = torch.ops.aten.relu.default(primals_1)"}, r":8: .*end with return"),
    "nested call": (
        {
            "body": (
                "x = torch.ops.aten.relu.default(torch.ops.aten.relu.default(primals_1))\nreturn"
                " (x,)"
            )
        },
        r":8: .*the argument torch\.ops",
    ),
    "unknown constant": (
        {
            "body": (
                "x = torch.ops.aten._to_copy.default(primals_1, dtype = torch.float7)\nreturn (x,)"
            )
        },
        r":8: .*torch\.float7",
    ),
    "unknown device": (
        {
            "body": (
                "x = torch.ops.aten.ones.default([2], device = device(type='abacus'))\nreturn (x,)"
            )
        },
        r":8: .*abacus",
    ),
    "missing attribute": ({"body": "x = self.x\nreturn (x,)"}, r":8: .*self\.x"),
    "shapes do not fit": (
        {"body": "x = torch.ops.aten.mm.default(primals_1, primals_1)\nreturn (x,)"},
        r":8: .*at node x, found",
    ),
    "wrong arguments": (
        {"body": "x = torch.ops.aten.mm.default(primals_1)\nreturn (x,)"},
        r":8: .*at node x, found",
    ),
    "group without size": (
        {
            "body": (
                f"c = torch.ops._c10d_functional.all_reduce.default(primals_1, 'sum', '7')\n{WAIT}"
            )
        },
        r":8: .*size of process group '7'",
    ),
    "group of two sizes": (
        {
            "body": (
                "b = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 4,"
                " '7')\nc = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1,"
                f" 2, '7')\n{WAIT}"
            ),
        },
        r":9: .*4 process ranks throughout, found 2",
    ),
    "odd groups": (
        {"body": "return (primals_1,)", "tail": "setup_fake_process_groups({'7': {'rank': 0}})"},
        r":14: .*of the process groups",
    ),
    "point to point": (
        {"body": "c = torch.ops._c10d_functional.nope.default(primals_1)\nreturn (c,)"},
        r":8: .*_c10d_functional\.nope",
    ),
    "too few inputs": (
        {"body": "return (a,)", "signature": "a, b"},
        r":10: .*2 inputs in load_args.*found 1",
    ),
    "no shape": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0)"},
        r":12: .*without its storage and shape",
    ),
    "no storage": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf1, (2,))"},
        r":12: .*buf1, a storage that no line",
    ),
    "storage too small": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (200,))"},
        r":12: .*needs 800 bytes in a storage of 512",
    ),
    "negative shape": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (-2,))"},
        r":12: .*negative shape",
    ),
    "strides missing": (
        {
            "body": "return (a,)",
            "signature": "a",
            "args": STORAGE + "reader.tensor(buf0, (2, 2), (1,))",
        },
        r":12: .*2 dimensions with 1 strides",
    ),
    "unknown symbol": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (s5, 2))"},
        r":12: .*symbolic size s5.*'s5 = <size>'",
    ),
    "dtype unknown": (
        {
            "body": "return (a,)",
            "signature": "a",
            "args": STORAGE + "reader.tensor(buf0, (2,), dtype=torch.nope)",
        },
        r":12: .*torch\.nope",
    ),
    "code in load_args": (
        {"body": "return (a,)", "signature": "a", "args": "import os\n" + STORAGE},
        r":11: .*'import os'",
    ),
    "call in a shape": (
        {
            "body": "return (a,)",
            "signature": "a",
            "args": STORAGE + "reader.tensor(buf0, (exit(3),))",
        },
        r":12: .*exit\(3\) where a size",
    ),
    "huge exponent": (
        {
            "body": "return (a,)",
            "signature": "a",
            "args": "buf0 = reader.storage(None, 9**9**9)\nreader.tensor(buf0, (2,))",
        },
        r":11: .*exponent",
    ),
    "unsupported input": (
        {
            "body": "x = torch.ops.aten.relu.default(a)\nreturn (x,)",
            "signature": "a",
            "args": "reader.unsupported('a')",
        },
        r":12: .*input a, which node x uses",
    ),
    "constant input": (
        {
            "body": "x = torch.ops.aten.relu.default(a)\nreturn (x,)",
            "signature": "a",
            "args": "reader.const('a')",
        },
        r":12: .*left out as a constant",
    ),
    "unknown reader method": (
        {"body": "return (a,)", "signature": "a", "args": "reader.hologram('a')"},
        r":11: .*reader\.hologram",
    ),
    "syntax in forward": (
        {"body": "x = torch.ops.aten.relu.default(primals_1\nreturn (x,)"},
        r":8: .*Python in class Repro",
    ),
    "syntax in load_args": (
        {"body": "return (a,)", "signature": "a", "args": STORAGE + "reader.tensor(buf0, (2,"},
        r":12: .*Python in load_args",
    ),
    "constant too odd": (
        {
            "body": "x = self.x\nreturn (x,)",
            "init": "self.register_buffer('x', tensor(open('f').read()))",
        },
        r":6: .*constant tensor",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_refused_by_line(
    case: str, write: WRITE, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, message = BROKEN[case]
    path = write(**arguments)
    with pytest.raises(InputError, match=r"repro\.py" + message) as caught:
        read_repro(path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n", r"x\.py:1: expected a repro file, found an empty one"),
    "no Python": (b"hello there, general\n", r"x\.py:1: .*found no Python"),
    "binary": (b"PK\x03\x04\xff\xfe\x00\x00", r"x\.py:1: .*no UTF-8"),
    "zero bytes": (b"import torch\n\0\0\0", r"x\.py:2: .*binary data"),
    "another Python file": (
        b"import torch\nprint(1)\n",
        r"x\.py:1: expected class Repro\(torch\.nn\.Module\), found none",
    ),
    "printed graph": (
        (
            b"# printed\nclass <lambda>(torch.nn.Module):\n    def forward(self, x):\n       "
            b" return x\n"
        ),
        r"x\.py:2: .*printed graph",
    ),
    "no repro written": (
        b"Repro is not generated due to existence of BackwardState in graph input",
        r"x\.py:1: torch wrote no repro",
    ),
    "no load_args": (
        b"import torch\nclass Repro(torch.nn.Module):\n    def forward(self):\n        return ()\n",
        r"x\.py:4: .*load_args",
    ),
    "no forward": (
        b"class Repro(torch.nn.Module):\n    pass\ndef load_args(reader):\n    pass\n",
        r"x\.py:1: .*forward",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = FOREIGN[case]
    (tmp_path / "x.py").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_repro(tmp_path / "x.py")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("name", ["fsdp_forward_cuda.py.txt", "fsdp_backward_symbolic.py.txt"])
def test_truncated_file_is_refused(name: str, part: float, tmp_path: Path) -> None:
    text = (DATA / name).read_text()
    text = text[: text.index("load_args._version")]
    (tmp_path / "cut.py").write_text(text[: int(len(text) * part)])
    with pytest.raises(InputError, match=r"cut\.py:\d+: expected"):
        read_repro(tmp_path / "cut.py")


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.py: .*found nothing there"):
        read_repro(tmp_path / "none.py")
    with pytest.raises(
        InputError, match="expected graphs that torch wrote, found none; hand in a directory"
    ):
        read_repro(tmp_path)
