"""What a server can infer from a silo's answers (section 4.3), under a stated attacker."""

from fedtmle.privacy.collision import collision_pair, reconstruction_risk
from fedtmle.privacy.disclosure import affine_decoder, attribute_risk
from fedtmle.privacy.modulus import design_modulus

__all__ = ["affine_decoder", "attribute_risk", "collision_pair", "design_modulus", "reconstruction_risk"]
