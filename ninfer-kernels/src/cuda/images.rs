//! All compiled kernels, by family, least specific target first. Written by `cargo xtask ptx`.

use ninfer_core::capability::{PtxIsa, Target};

use super::kernels::Image;

pub(super) const IMAGES: &[Image] = &[
    Image {
        family: "gdn",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/gdn.sm_80.ptx.z"),
        entries: &[
            "gdn_norm",
            "gdn_prompt_columns_4",
            "gdn_prompt_columns_8",
            "gdn_round_columns_4",
            "gdn_round_columns_8",
        ],
    },
    Image {
        family: "gdn_delta",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/gdn_delta.sm_80.ptx.z"),
        entries: &["gdn_prompt_full", "gdn_round_full"],
    },
    Image {
        family: "gdn_delta_any",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/gdn_delta_any.sm_80.ptx.z"),
        entries: &["gdn_prompt_256", "gdn_prompt_32", "gdn_round_256", "gdn_round_32"],
    },
    Image {
        family: "gdn_step",
        target: Target::Sm90,
        isa: PtxIsa::new(8, 0),
        bytes: include_bytes!("../../ptx/gdn_step.sm_90.ptx.z"),
        entries: &["gdn_step_1", "gdn_step_2", "gdn_step_3"],
    },
    Image {
        family: "linear_bf16",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_bf16.sm_80.ptx.z"),
        entries: &["linear_bf16_16", "linear_bf16_64", "linear_bf16_8", "linear_bf16_8_any"],
    },
    Image {
        family: "linear_fp8",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_fp8.sm_80.ptx.z"),
        entries: &["linear_fp8_16", "linear_fp8_64", "linear_fp8_8", "linear_fp8_8_any"],
    },
    Image {
        family: "linear_nvfp4",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_nvfp4.sm_80.ptx.z"),
        entries: &["linear_nvfp4_16", "linear_nvfp4_64", "linear_nvfp4_8", "linear_nvfp4_8_any"],
    },
    Image {
        family: "linear_q4",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_q4.sm_80.ptx.z"),
        entries: &["linear_q4_16", "linear_q4_64", "linear_q4_8", "linear_q4_8_any"],
    },
    Image {
        family: "linear_q5",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_q5.sm_80.ptx.z"),
        entries: &["linear_q5_16", "linear_q5_64", "linear_q5_8", "linear_q5_8_any"],
    },
    Image {
        family: "linear_q6",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_q6.sm_80.ptx.z"),
        entries: &["linear_q6_16", "linear_q6_64", "linear_q6_8", "linear_q6_8_any"],
    },
    Image {
        family: "linear_w8",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/linear_w8.sm_80.ptx.z"),
        entries: &["linear_w8_16", "linear_w8_64", "linear_w8_8", "linear_w8_8_any"],
    },
    Image {
        family: "moe",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/moe.sm_80.ptx.z"),
        entries: &["moe_combine", "moe_group", "moe_top_k"],
    },
    Image {
        family: "norm",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/norm.sm_80.ptx.z"),
        entries: &["copy_rows", "embed_rows", "norm_rows", "round_rows", "stem_rows"],
    },
    Image {
        family: "pack",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/pack.sm_80.ptx.z"),
        entries: &["pack_fp8", "pack_nvfp4", "pack_plain", "pack_q4", "pack_q5", "pack_q6", "pack_w8"],
    },
    Image {
        family: "probe",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/probe.sm_80.ptx.z"),
        entries: &["probe_copy", "probe_fill", "probe_read"],
    },
    Image {
        family: "sample",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/sample.sm_80.ptx.z"),
        entries: &["sample_accept", "sample_count"],
    },
    Image {
        family: "sample_choose",
        target: Target::Sm80,
        isa: PtxIsa::new(7, 4),
        bytes: include_bytes!("../../ptx/sample_choose.sm_80.ptx.z"),
        entries: &["sample_draw", "sample_scan"],
    },
];
