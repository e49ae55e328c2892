"""What is trained."""

from dataclasses import dataclass

WORLD_SIZE = 4
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A preset on a mesh of four process ranks."""

    preset: str
    mesh: str
    reduce_dtype: str

    def __str__(self) -> str:
        return f"{self.preset} {self.mesh} {self.reduce_dtype}"


CASES = (
    Case("llama3-debug", "fsdp=4", "float64"),
    Case("llama3-debug", "fsdp=4", "float32"),
    Case("llama3-debug", "replicate=2,fsdp=2", "float32"),
    Case("llama3-debug", "replicate=4", "float32"),
    Case("llama3-debug", "fsdp=2,tp=2", "float32"),
    Case("deepseek-v3-debug", "fsdp=4,ep=2", "float32"),
)
