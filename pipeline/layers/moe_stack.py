"""A stack of blocks of which some have MoE layers, with the auxiliary losses of softmax routers."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.layers.moe import moe_layers
from pipeline.layers.router import AuxLoss
from pipeline.layers.stack import Stack


class MoEStack(Stack):
    """Stack with auxiliary losses of its MoE layers."""

    def set_loss_weights(self, weights: Mapping[str, float]) -> None:
        """See Stack."""
        for moe in moe_layers(self):
            moe.aux_loss = AuxLoss(batch=weights["balance_loss"], z=weights["z_loss"])
