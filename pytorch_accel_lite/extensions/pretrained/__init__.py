"""Models of transformers, PEFT, diffusers and timm, saved in the forms of these libraries, with their tokenizers."""

from pytorch_accel_lite.extending import MODEL_FORMS
from pytorch_accel_lite.extensions.pretrained.forms import DiffusersForm, TimmForm, TransformersForm
from pytorch_accel_lite.extensions.pretrained.peft_adapters import PeftForm

__all__ = ["DiffusersForm", "PeftForm", "TimmForm", "TransformersForm"]

MODEL_FORMS["peft"] = PeftForm()
MODEL_FORMS["transformers"] = TransformersForm()
MODEL_FORMS["diffusers"] = DiffusersForm()
MODEL_FORMS["timm"] = TimmForm()
