"""What is done to the weights of a model on their way into ONNX, beyond what their block types say.

A method says in what form each matrix of the layers is stored, and what is moved from one tensor into another.
Embedding and head stay as the file has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge.converters.quantizers import nf4
from edge.converters.writers.onnx_forms import Form, Int8, NormalFloats
from edge.types import FloatArray


@dataclass(frozen=True)
class Method:
    """form: of the matrices of all layers, or of each by its name (`blk.0.attn_q`); None: as their types say.

    multiplied: columns of matrices, float32 [columns]. divided: values of vectors, or rows of matrices, float32
    [rows]. Together they change nothing but the size of what flows between (SmoothQuant).
    """

    name: str = ""
    form: Form | None = None
    forms: Mapping[str, Form] = field(default_factory=dict)
    multiplied: Mapping[str, FloatArray] = field(default_factory=dict)
    divided: Mapping[str, FloatArray] = field(default_factory=dict)

    def form_of(self, name: str, columns: int) -> Form | None:
        """None: as the types say. name: the first part's, where matrices are joined."""
        if not name.startswith("blk."):
            return None
        form = self.forms.get(name, self.form)
        return None if isinstance(form, NormalFloats) and columns % nf4.BLOCK else form


AS_IT_IS = Method()
NF4 = Method("nf4", NormalFloats())
W8A8 = Method("w8a8", Int8())
