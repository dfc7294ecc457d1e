"""CudaOps: what models are built of on a GPU (common/engine/ops.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.engine.cuda import kernels
from common.engine.cuda.linear_plans import best_plan
from common.engine.cuda.small_linear import Plan, Workspace, small_linear
from common.engine.layers import Block, Linear, NormedBlock, Unnormed

FOLD_ROWS = 4096
"""Of a weight, in float32 at a time."""
LATE_TOKENS = 128
"""Up to so many, products behind a norm are computed of x as it is, and the kernel that takes them (SiLU's, or the one that
rotates and stores heads) divides by the root: a kernel less."""


class CudaOps:
    """For few tokens a product is the time of reading its weight: one kernel with what is around it (linear_plans.py). Else
    cuBLAS and fused small kernels."""

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Workspace] = {}

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return CudaLinear(weight, bias, self._workspace(weight.device))

    def normed_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor,
        eps: float,
        shared: bool = False,
    ) -> NormedBlock:
        return CudaNormedLinear(weight, bias, norm, eps, self._workspace(weight.device), folded=not shared)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, norm: torch.Tensor, eps: float) -> Block:
        return CudaNormedLinear(weight, bias, norm, eps, self._workspace(weight.device), folded=True, gated=True)

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def _workspace(self, device: torch.device) -> Workspace:
        """One for all products of the device: they follow each other on one stream."""
        if device not in self._workspaces:
            self._workspaces[device] = Workspace(device)
        return self._workspaces[device]


class CudaLinear:
    """x W^T + b. weight: [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, workspace: Workspace) -> None:
        self._weight = weight
        self._transposed = weight.T
        self._bias = bias
        self._workspace = workspace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """In place, within the product: residual is read and written once."""
        if self._bias is not None:
            residual += self._bias
        if (plan := best_plan(len(x), self._weight)) is not None:
            return small_linear(x, self._weight, residual, residual=residual, workspace=self._workspace, plan=plan)
        return residual.addmm_(x, self._transposed)


def fold_norm(weight: torch.Tensor, norm: torch.Tensor) -> None:
    """weight: [out, in] times diag(norm), in place, rounded once."""
    for rows in weight.split(FOLD_ROWS):
        rows.copy_(rows.float() * norm.float())


class CudaNormedLinear:
    """norm(x) W^T + b, and what gated_linear makes of it."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
        workspace: Workspace,
        *,
        folded: bool,
        gated: bool = False,
    ) -> None:
        """folded: norm is multiplied into weight, in place."""
        if folded:
            fold_norm(weight, norm)
        self._weight, self._bias, self._eps = weight, bias, eps
        self._norm = None if folded else norm
        # Not in float16, which holds no more than 65504; a bias is not to be divided.
        self._late_tokens = LATE_TOKENS if folded and bias is None and weight.dtype == torch.bfloat16 else 0
        self._workspace = workspace
        self._gated = gated
        self._columns = len(weight) // 2 if gated else len(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (plan := self._plan(x)) is not None:
            return self._small_product(x, plan)
        if not self._gated:
            return self._normed_product(x)
        product, unnormed = self._late_product(x)
        return kernels.silu_and_mul(product, x.new_empty(len(x), self._columns), unnormed=unnormed)

    def forward_late(self, x: torch.Tensor) -> tuple[torch.Tensor, Unnormed | None]:
        """Not of a gated one."""
        return self._late_product(x) if self._plan(x) is None else (self.forward(x), None)

    def _plan(self, x: torch.Tensor) -> Plan | None:
        if self._bias is not None:
            return None
        plan = best_plan(len(x), self._weight, gated=self._gated)
        return None if plan is not None and plan.dot and self._norm is not None else plan

    def _small_product(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        return small_linear(
            x,
            self._weight,
            x.new_empty(len(x), self._columns),
            norm=True,
            norm_weight=self._norm,
            eps=self._eps,
            gated=self._gated,
            workspace=self._workspace,
            plan=plan,
        )

    def _normed_product(self, x: torch.Tensor) -> torch.Tensor:
        normed = kernels.rms_norm(x, self._norm, eps=self._eps, out=torch.empty_like(x))
        return F.linear(normed, self._weight, self._bias)

    def _late_product(self, x: torch.Tensor) -> tuple[torch.Tensor, Unnormed | None]:
        if len(x) > self._late_tokens:
            return self._normed_product(x), None
        return F.linear(x, self._weight), Unnormed(x, self._eps)
