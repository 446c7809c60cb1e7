//! Bytes a token and ceilings, against figures worked out by hand and published ones.

use ninfer_core::format::GroupFormat;
use ninfer_core::memory::KvFormat;
use ninfer_core::roofline::{self, BytesMoved, RoundOptions, bytes_per_round, bytes_per_token};
use ninfer_core::shape::{ModelShape, Part, Role, TensorShape, published};
use ninfer_core::{Error, WeightFormat};

const Q4: WeightFormat = WeightFormat::Group(GroupFormat::Q4);
const Q5: WeightFormat = WeightFormat::Group(GroupFormat::Q5);
const Q6: WeightFormat = WeightFormat::Group(GroupFormat::Q6);
const W8: WeightFormat = WeightFormat::Group(GroupFormat::W8);

/// The groupwise-integer recipe of NInfer for 27B.
fn groupwise_27b(t: &TensorShape) -> WeightFormat {
    match (t.part, t.role) {
        (_, Role::GdnA | Role::GdnB) => WeightFormat::Bf16,
        (Part::Mtp, _) => W8,
        (_, Role::Embedding | Role::Head) => Q6,
        (_, Role::AttnQuery | Role::AttnKey | Role::GdnQueryKey | Role::FfnGate | Role::FfnUp) => Q4,
        _ => Q5,
    }
}

/// The groupwise-integer recipe of NInfer for 35B-A3B.
fn groupwise_35b(t: &TensorShape) -> WeightFormat {
    match (t.part, t.role) {
        (_, Role::GdnA | Role::GdnB | Role::Router | Role::SharedScale) => WeightFormat::Bf16,
        (Part::Mtp, _) => W8,
        (_, Role::Head) => Q6,
        (_, Role::ExpertGate | Role::ExpertUp) => Q4,
        (Part::Layer(34 | 38 | 39), Role::ExpertDown) => Q6,
        (_, Role::ExpertDown) => Q5,
        _ => W8,
    }
}

/// NVFP4 in the MLP, FP8 in attention and GDN projections, BF16 elsewhere, as in the published mixed-precision file but
/// with the head in BF16.
fn mixed_27b(t: &TensorShape) -> WeightFormat {
    match t.role {
        Role::FfnGate | Role::FfnUp | Role::FfnDown => WeightFormat::Nvfp4,
        Role::Embedding | Role::Head | Role::GdnA | Role::GdnB => WeightFormat::Bf16,
        _ => WeightFormat::Fp8Tensor,
    }
}

fn gb(b: BytesMoved) -> f64 {
    b.total() as f64 / 1e9
}

fn near(got: f64, want: f64, share: f64) {
    assert!((got / want - 1.0).abs() <= share, "{got} is not within {share} of {want}");
}

#[test]
fn groupwise_27b_moves_15_6_gb() {
    let shape = published("27b").unwrap();
    let bytes = bytes_per_token(&shape, groupwise_27b, 0, KvFormat::Int8G64).unwrap();
    // Published as about 15.6; the figure has one decimal.
    near(gb(bytes), 15.6, 0.01);
    assert_eq!(bytes.state, 2 * 150_994_944);
    // At a prompt of 7,680 tokens about 15.9.
    near(gb(bytes_per_token(&shape, groupwise_27b, 7680, KvFormat::Int8G64).unwrap()), 15.9, 0.01);
}

#[test]
fn groupwise_35b_moves_2_6_gb() {
    let shape = published("35b-a3b").unwrap();
    let bytes = bytes_per_token(&shape, groupwise_35b, 0, KvFormat::Int8G64).unwrap();
    near(gb(bytes), 2.6, 0.03);
    near(bytes.state as f64 / 1e9, 0.13, 0.05);
    near(gb(bytes_per_token(&shape, groupwise_35b, 7680, KvFormat::Int8G64).unwrap()), 2.75, 0.02);
}

#[test]
fn mixed_27b_moves_19_7_gb_and_its_ceiling_on_a_gb10_is_13_9() {
    let shape = published("27b").unwrap();
    let bytes = bytes_per_token(&shape, mixed_27b, 0, KvFormat::Bf16).unwrap();
    near(gb(bytes), 19.7, 0.01);
    let bandwidth = ninfer_core::known::profile("gb10").unwrap().bandwidth.value;
    near(roofline::ceiling(bytes.total(), bandwidth), 13.9, 0.01);
    let milliseconds = 1e3 / roofline::ceiling(19_700_000_000, bandwidth);
    assert_eq!(format!("{milliseconds:.0}"), "72");
    // 10.6 tok/s were measured there.
    near(roofline::share(19_700_000_000, 1.0 / 10.6, bandwidth), 0.765, 0.001);
}

#[test]
fn hand_count_of_nvfp4_27b() {
    // Every layer matrix in NVFP4, 9/16 byte a weight and 4 bytes a matrix.
    let shape = published("27b").unwrap();
    let bytes = bytes_per_token(&shape, |_| WeightFormat::Nvfp4, 0, KvFormat::Bf16).unwrap();
    let p = shape.parameters();
    let weights = (p.layers + p.head) as f64 * 9.0 / 16.0;
    // Norms and convolutions are f32, one embedding row is read.
    near(bytes.weights as f64, weights, 0.01);
}

#[test]
fn cache_and_state_follow_context_and_format() {
    let shape = published("35b-a3b").unwrap();
    let at = |context, kv| bytes_per_token(&shape, groupwise_35b, context, kv).unwrap();
    assert_eq!(at(1000, KvFormat::Bf16).kv, 1001 * 20_480);
    assert_eq!(at(1000, KvFormat::Int8G64).kv, 1001 * 10_560);
    assert_eq!(at(0, KvFormat::Bf16).state, at(1 << 20, KvFormat::F32).state);
    assert_eq!(at(0, KvFormat::Bf16).weights, at(1 << 20, KvFormat::F32).weights);
}

#[test]
fn tied_models_read_their_embedding_once() {
    let tied = published("2b").unwrap();
    let mut untied = tied.clone();
    untied.tied = false;
    let weights = |s: &ModelShape| bytes_per_token(s, |_| WeightFormat::Bf16, 0, KvFormat::Bf16).unwrap().weights;
    assert_eq!(weights(&untied) - weights(&tied), 2 * 2048, "one more row is looked up");
}

#[test]
fn a_round_without_drafts_is_a_step() {
    for name in ["27b", "35b-a3b"] {
        let shape = published(name).unwrap();
        let options = RoundOptions::new(&shape, 500, 0);
        let round = bytes_per_round(&shape, groupwise_35b, &options).unwrap();
        assert_eq!(round, bytes_per_token(&shape, groupwise_35b, 500, KvFormat::Bf16).unwrap(), "{name}");
    }
}

#[test]
fn a_dense_round_adds_draft_steps_only() {
    let shape = published("27b").unwrap();
    let step = bytes_per_token(&shape, groupwise_27b, 0, KvFormat::Int8G64).unwrap();
    let options = RoundOptions::new(&shape, 0, 3).with_kv(KvFormat::Int8G64);
    let round = bytes_per_round(&shape, groupwise_27b, &options).unwrap();
    let head = Q6.bytes(248_320, 5120) as u64;
    let mtp: u64 = shape
        .tensors()
        .filter(|t| t.part == Part::Mtp)
        .map(|t| if t.role.is_matrix() { W8.bytes(t.rows, t.cols) as u64 } else { 4 * t.elements() })
        .sum();
    let rows = 3 * Q6.bytes(1, 5120) as u64;
    assert_eq!(round.weights - step.weights, 3 * (head + mtp) + rows);
    assert_eq!(round.state, step.state, "the matrix is read and written once a round");
}

#[test]
fn four_columns_of_uniform_routing_touch_about_thirty_experts() {
    let shape = published("35b-a3b").unwrap();
    near(roofline::expected_distinct_experts(&shape, 4), 30.5, 0.01);
    let four = bytes_per_round(&shape, groupwise_35b, &RoundOptions::new(&shape, 7680, 3)).unwrap();
    let agree = RoundOptions::new(&shape, 7680, 3).with_distinct_experts(8.0);
    assert!(four.weights > bytes_per_round(&shape, groupwise_35b, &agree).unwrap().weights);
    assert_eq!(roofline::expected_distinct_experts(&published("9b").unwrap(), 4), 0.0);
}

#[test]
fn what_cannot_be_is_an_error() {
    let mut shape = published("35b-a3b").unwrap();
    for distinct in [-1.0, 257.0, f64::NAN, f64::INFINITY] {
        let options = RoundOptions::new(&shape, 0, 3).with_distinct_experts(distinct);
        assert!(matches!(bytes_per_round(&shape, groupwise_35b, &options), Err(Error::OutOfRange { .. })));
    }
    assert!(bytes_per_token(&shape, groupwise_35b, usize::MAX, KvFormat::F32).is_err());
    shape.mtp = false;
    let drafting = RoundOptions::new(&shape, 0, 3);
    assert!(matches!(bytes_per_round(&shape, groupwise_35b, &drafting), Err(Error::MtpUnavailable { .. })));
    assert!(bytes_per_round(&shape, groupwise_35b, &RoundOptions::new(&shape, 0, 0)).is_ok());
    shape.hidden = 0;
    assert!(bytes_per_token(&shape, groupwise_35b, 0, KvFormat::F32).is_err());
}

#[test]
fn bytes_print_in_gb() {
    let shape = published("35b-a3b").unwrap();
    let text = bytes_per_token(&shape, groupwise_35b, 7680, KvFormat::Int8G64).unwrap().to_string();
    assert!(text.starts_with("2.7") && text.contains("KV 0.08") && text.contains("state 0.13"), "{text}");
}
