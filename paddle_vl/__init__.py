"""Vision-language models and vision-language-action policies for PaddlePaddle.

Public names are imported on first use, so `import paddle_vl` and the NumPy-only data workers never
load Paddle.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle_vl.config.schema import LoRAConfig
    from paddle_vl.families.paddleocr_vl.config import PaddleOCRVLConfig
    from paddle_vl.families.paddleocr_vl.inputs.processor import PaddleOCRVLProcessor
    from paddle_vl.families.paddleocr_vl.model import PaddleOCRVLForConditionalGeneration
    from paddle_vl.families.pi07.config import PI07Config
    from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
    from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
    from paddle_vl.families.qwen3_5.config import Qwen3_5Config
    from paddle_vl.families.qwen3_5.model import (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForConditionalGeneration,
    )
    from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
    from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
    from paddle_vl.families.qwen4_exp.config import Qwen4ExpConfig
    from paddle_vl.families.qwen4_exp.model import Qwen4ExpForConditionalGeneration
    from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
    from paddle_vl.generation.config import GenerationConfig

__version__ = "0.3.0"

if find_spec("paddle") is None:
    raise ImportError(
        "paddle_vl needs PaddlePaddle, which is not installed. Choose one wheel:\n"
        "  CPU: pip install 'paddle-vl[cpu]'   (paddlepaddle 3.3)\n"
        "  GPU: pip install 'paddle-vl[gpu]'   (paddlepaddle-gpu 3.3, built for your CUDA; see\n"
        "       https://www.paddlepaddle.org.cn/install/quick for its index)"
    )

_HOME = {
    "GenerationConfig": "paddle_vl.generation.config",
    "LoRAConfig": "paddle_vl.config.schema",
    "PI07Config": "paddle_vl.families.pi07.config",
    "PI07HighLevelPlanner": "paddle_vl.families.pi07.planner",
    "PI07LowLevelPolicy": "paddle_vl.families.pi07.policy",
    "PaddleOCRVLConfig": "paddle_vl.families.paddleocr_vl.config",
    "PaddleOCRVLForConditionalGeneration": "paddle_vl.families.paddleocr_vl.model",
    "PaddleOCRVLProcessor": "paddle_vl.families.paddleocr_vl.inputs.processor",
    "Qwen3_5Config": "paddle_vl.families.qwen3_5.config",
    "Qwen3_5ForConditionalGeneration": "paddle_vl.families.qwen3_5.model",
    "Qwen3_5MoeForConditionalGeneration": "paddle_vl.families.qwen3_5.model",
    "Qwen4ExpConfig": "paddle_vl.families.qwen4_exp.config",
    "Qwen4ExpForConditionalGeneration": "paddle_vl.families.qwen4_exp.model",
    "Qwen3VLConfig": "paddle_vl.families.qwen3_vl.config",
    "Qwen3VLForConditionalGeneration": "paddle_vl.families.qwen3_vl.model",
    "Qwen3VLProcessor": "paddle_vl.families.vlm.inputs.processor",
}
__all__ = [
    "GenerationConfig",
    "LoRAConfig",
    "PI07Config",
    "PI07HighLevelPlanner",
    "PI07LowLevelPolicy",
    "PaddleOCRVLConfig",
    "PaddleOCRVLForConditionalGeneration",
    "PaddleOCRVLProcessor",
    "Qwen3VLConfig",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLProcessor",
    "Qwen3_5Config",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpConfig",
    "Qwen4ExpForConditionalGeneration",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'paddle_vl' has no attribute {name!r}; it offers {__all__}")
