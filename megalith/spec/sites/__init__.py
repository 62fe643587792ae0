"""Sites: groups of ranks that each run the whole plan, and merge their weights now and then (DiLoCo, Douillard et al. 2023,
arXiv:2311.08105; Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). Arithmetic only, no torch."""

from megalith.spec.sites.cut import (
    BLOCK,
    FRAME_BYTES,
    FRAME_PAYLOAD,
    HEAD_BYTES,
    VERDICT_BYTES,
    Fragment,
    Piece,
    encoded_bytes,
    fragments,
    outer_slots,
    part_of,
    sent_after,
    verdict_bytes,
    wire_bytes,
)
from megalith.spec.sites.table import FULL, SitesSpec, folder_of, kept, within

__all__ = [
    "BLOCK",
    "FRAME_BYTES",
    "FRAME_PAYLOAD",
    "FULL",
    "HEAD_BYTES",
    "VERDICT_BYTES",
    "Fragment",
    "Piece",
    "SitesSpec",
    "encoded_bytes",
    "folder_of",
    "fragments",
    "kept",
    "outer_slots",
    "part_of",
    "sent_after",
    "verdict_bytes",
    "wire_bytes",
    "within",
]
