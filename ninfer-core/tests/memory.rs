//! The memory plan: exact bytes where users were surprised, sums, and input that makes no sense.

use ninfer_core::memory::{KvFormat, MAX_CONTEXT, MAX_LANES, PlanOptions, binary_size, largest_context, plan};
use ninfer_core::shape::{AttentionShape, FfnShape, GdnShape, LayerKind, ModelShape, TensorShape, published};
use ninfer_core::{DType, Error, WeightFormat};
use proptest::prelude::*;

fn bf16(_: &TensorShape) -> WeightFormat {
    WeightFormat::Bf16
}

#[test]
fn no_record_without_speculation() {
    // A user saw 9,725 MiB of recurrent planes reserved for a model that could not draft.
    let shape = published("27b").unwrap();
    let off = plan(&shape, bf16, &PlanOptions::new(4096).with_activation(DType::F32)).unwrap();
    assert_eq!(off.recurrent, 150_994_944);
    assert_eq!(off.conv, 5_898_240);
    assert_eq!((off.records, off.mtp_weights, off.mtp_kv), (0, 0, 0));
    let on = plan(&shape, bf16, &PlanOptions::new(4096).with_draft_window(3)).unwrap();
    assert_eq!((on.recurrent, on.conv), (150_994_944, 2_949_120));
    assert_eq!(on.records, 4 * shape.record_bytes_per_token(2));
    let lanes = plan(&shape, bf16, &PlanOptions::new(4096).with_draft_window(3).with_lanes(5)).unwrap();
    assert_eq!((lanes.recurrent, lanes.records), (5 * on.recurrent, 5 * on.records));
}

#[test]
fn bf16_weights_are_two_bytes_a_parameter() {
    for name in ninfer_core::shape::PUBLISHED {
        let shape = published(name).unwrap();
        let plan = plan(&shape, bf16, &PlanOptions::new(64).with_mtp(true)).unwrap();
        let f32_parameters: u64 = shape.tensors().filter(|t| !t.role.is_matrix()).map(|t| 2 * t.parameters()).sum();
        assert_eq!(plan.weights + plan.mtp_weights, 2 * shape.parameters().total() + f32_parameters, "{name}");
    }
}

#[test]
fn mtp_is_planned_only_where_it_exists_and_is_wanted() {
    let mut shape = published("0.8b").unwrap();
    let drafting = PlanOptions::new(1000).with_draft_window(2);
    let with = plan(&shape, bf16, &drafting).unwrap();
    assert_eq!(with.mtp_kv, 1024 * 2 * 2 * 256 * 2);
    let ngram = plan(&shape, bf16, &drafting.with_mtp(false)).unwrap();
    assert_eq!((ngram.mtp_kv, ngram.mtp_weights), (0, 0));
    assert_eq!(ngram.records, with.records);
    shape.mtp = false;
    assert_eq!(plan(&shape, bf16, &drafting.with_mtp(true)).unwrap().mtp_weights, 0);
}

#[test]
fn total_is_the_sum_and_decides_what_fits() {
    let shape = published("35b-a3b").unwrap();
    let p = plan(&shape, bf16, &PlanOptions::new(8192).with_reserve(1 << 30)).unwrap();
    assert_eq!(p.total, p.rows().iter().map(|r| r.1).sum::<u64>());
    assert!(p.fits(p.total) && p.check(p.total).is_ok());
    assert_eq!(
        p.check(p.total - 1).unwrap_err(),
        Error::OutOfMemory { what: "the memory plan".into(), requested: p.total, available: p.total - 1 }
    );
}

#[test]
fn table_is_aligned() {
    let text = plan(&published("4b").unwrap(), bf16, &PlanOptions::new(4096)).unwrap().to_string();
    let widths: Vec<usize> = text.lines().map(str::len).collect();
    assert_eq!(widths.len(), 10);
    assert!(widths.iter().all(|&w| w == widths[0]), "{text}");
    assert!(text.lines().last().unwrap().starts_with("total"));
}

#[test]
fn sizes_are_printed_in_binary_units() {
    assert_eq!(binary_size(0), "0 B");
    assert_eq!(binary_size(1023), "1023 B");
    assert_eq!(binary_size(1536), "1.50 KiB");
    assert_eq!(binary_size(3 << 30), "3.00 GiB");
    assert_eq!(binary_size(u64::MAX), "16384.00 PiB");
}

#[test]
fn absurd_input_is_an_error() {
    let shape = published("27b").unwrap();
    let good = PlanOptions::new(4096);
    for options in [
        PlanOptions::new(0),
        PlanOptions::new(usize::MAX),
        good.with_lanes(0),
        good.with_lanes(usize::MAX),
        good.with_draft_window(usize::MAX),
        good.with_prefill_chunk(0),
        good.with_activation(DType::I8),
        good.with_reserve(u64::MAX),
    ] {
        assert!(matches!(plan(&shape, bf16, &options), Err(Error::OutOfRange { .. })), "{options:?}");
    }
    let most = PlanOptions::new(MAX_CONTEXT).with_lanes(MAX_LANES).with_draft_window(MAX_LANES);
    assert!(plan(&shape, bf16, &most).is_err());
    let mut wide = shape.clone();
    wide.ffn = FfnShape::Moe {
        experts: ninfer_core::shape::MAX_DIM,
        top_k: 1,
        width: ninfer_core::shape::MAX_DIM,
        shared_width: ninfer_core::shape::MAX_DIM,
    };
    assert!(plan(&wide, bf16, &good).is_err());
    wide.hidden = usize::MAX;
    assert!(plan(&wide, bf16, &good).is_err());
}

#[test]
fn the_largest_context_is_the_last_that_fits() {
    let shape = published("35b-a3b").unwrap();
    let format = |_: &TensorShape| WeightFormat::Nvfp4;
    let options = PlanOptions::new(262_144).with_kv(KvFormat::Int8G64).with_draft_window(3).with_lanes(2);
    let total = |context| plan(&shape, format, &options.with_max_context(context)).unwrap().total;
    let usable = 24 << 30;
    let context = largest_context(&shape, format, &options, usable).unwrap();
    assert!(context % 64 == 0 && total(context) <= usable && total(context + 64) > usable, "{context}");
    assert_eq!(largest_context(&shape, format, &options, u64::MAX), Ok(262_144));
    assert_eq!(largest_context(&shape, format, &options, total(64)), Ok(64));
    let error = largest_context(&shape, format, &options, total(64) - 1).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }));
    let odd = PlanOptions::new(100);
    let needed = plan(&shape, format, &odd).unwrap().total;
    assert_eq!(largest_context(&shape, format, &odd, needed), Ok(100));
    assert_eq!(largest_context(&shape, format, &odd, needed - 1), Ok(64));
    assert!(largest_context(&shape, format, &PlanOptions::new(0), u64::MAX).is_err());
}

/// Sizes from nothing to everything, the small ones often.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..5000, 1 => any::<usize>(), 1 => Just(0), 1 => (0u32..64).prop_map(|s| 1usize << s)]
}

prop_compose! {
    fn any_shape()(
        dims in proptest::array::uniform13(size()),
        kinds in proptest::collection::vec(any::<bool>(), 0..6),
        flags in any::<[bool; 3]>(),
        kernel in size(),
    ) -> ModelShape {
        let kind = |full| if full { LayerKind::FullAttention } else { LayerKind::LinearAttention };
        ModelShape {
            hidden: dims[0],
            layers: kinds.into_iter().map(kind).collect(),
            attention: AttentionShape { query_heads: dims[1], kv_heads: dims[2], head_dim: dims[3] },
            gdn: GdnShape {
                key_heads: dims[4],
                value_heads: dims[5],
                key_dim: dims[6],
                value_dim: dims[7],
                conv_kernel: kernel,
            },
            ffn: if flags[0] {
                FfnShape::Dense { intermediate: dims[8] }
            } else {
                FfnShape::Moe { experts: dims[8], top_k: dims[9], width: dims[10], shared_width: dims[11] }
            },
            vocab: dims[12],
            tied: flags[1],
            mtp: flags[2],
        }
    }
}

proptest! {
    #[test]
    fn any_shape_and_options_give_a_plan_or_an_error(
        shape in any_shape(),
        context in size(),
        lanes in size(),
        window in size(),
        chunk in size(),
        reserve: u64,
    ) {
        let options = PlanOptions::new(context)
            .with_lanes(lanes)
            .with_draft_window(window)
            .with_prefill_chunk(chunk)
            .with_reserve(reserve);
        if let Ok(p) = plan(&shape, bf16, &options) {
            let sum: u128 = p.rows().iter().map(|r| u128::from(r.1)).sum();
            prop_assert_eq!(sum, u128::from(p.total));
        }
        let _ = largest_context(&shape, bf16, &options, reserve);
        let _ = (shape.parameters(), shape.record_bytes_per_token(4), shape.conv_state_bytes(2));
        let _ = ninfer_core::roofline::bytes_per_token(&shape, bf16, context, KvFormat::Fp8);
    }

    #[test]
    fn legal_shapes_of_small_sizes_are_planned(
        hidden in 1usize..300, kv_heads in 1usize..4, groups in 1usize..4, head_dim in 1usize..100,
        key_heads in 1usize..4, value_groups in 1usize..4, lanes in 1usize..9, window in 0usize..5,
    ) {
        let shape = ModelShape {
            hidden,
            layers: ModelShape::layer_pattern(4, 4),
            attention: AttentionShape { query_heads: kv_heads * groups, kv_heads, head_dim },
            gdn: GdnShape {
                key_heads, value_heads: key_heads * value_groups, key_dim: 8, value_dim: 4, conv_kernel: 4,
            },
            ffn: FfnShape::Dense { intermediate: hidden },
            vocab: 10,
            tied: false,
            mtp: false,
        };
        let p = plan(&shape, bf16, &PlanOptions::new(64).with_lanes(lanes).with_draft_window(window)).unwrap();
        let (lanes, pages) = (lanes as u64, if window == 0 { 1 } else { 2 });
        prop_assert_eq!(p.kv, lanes * pages * 64 * 4 * (kv_heads * head_dim) as u64);
        prop_assert_eq!(p.recurrent, lanes * 3 * (key_heads * value_groups * 8 * 4 * 4) as u64);
    }
}
