"""Models to train, and the tolerance between captured and rewritten graphs.

A reduction over two process ranks gives the same bits in any order. Over four, gloo's (like NCCL's)
order of summation depends on where an element lies in the buffer, so a bucket may round
differently, whatever its payload order. It can't where sums are exact: gradients that were computed
in bfloat16 have 8 bits, so that float64 (53 bits) adds them without rounding. Float32 (24 bits)
does but for values 2^16 apart, and such there are: of llama3-debug's gradients over four replicas,
one entry adds 7.6e-5, -1.9e-4, -4.5e-9 and -3.5e-4, with two possible sums. So what must be bit for
bit over four process ranks is reduced in float64. Gradients computed in float32 differ: by a few
float32 roundings (2^-24) relative to a tensor's largest entry in each step, which training carries
on.
"""

from dataclasses import dataclass

WORLD_SIZE = 4
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A preset on a mesh of four process ranks."""

    preset: str
    mesh: str
    param_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    tolerance: float = 0.0
    """Largest difference of a loss or gradient, relative to the largest entry of its tensor; 0 is
    bit for bit.
    """

    def __str__(self) -> str:
        return f"{self.preset} {self.mesh} {self.param_dtype} {self.reduce_dtype}"


CASES = (
    Case("llama3-debug", "fsdp=4", reduce_dtype="float64"),
    Case("llama3-debug", "fsdp=4", param_dtype="float32", tolerance=2**-16),
    Case("llama3-debug", "replicate=2,fsdp=2"),
    Case("llama3-debug", "replicate=4", reduce_dtype="float64"),
    Case("llama3-debug", "replicate=4", param_dtype="float32", tolerance=2**-16),
    Case("llama3-debug", "fsdp=2,tp=2"),
    Case("deepseek-v3-debug", "fsdp=4,ep=2", reduce_dtype="float64"),
)
