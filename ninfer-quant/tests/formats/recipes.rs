//! Recipes: names, what they touch, and what they make.

use ninfer_core::WeightFormat;
use ninfer_core::format::GroupFormat;
use ninfer_quant::bridge::{BridgeScale, bridge};
use ninfer_quant::{Conversion, Error, ErrorReport, Recipe, TensorRole, convert, encode};

use crate::fixtures::weights;

#[test]
fn names_round_trip_and_the_error_lists_them() {
    for r in Recipe::ALL {
        assert_eq!(r.to_string().parse::<Recipe>().unwrap(), r);
    }
    let e = "Q4".parse::<Recipe>().unwrap_err();
    for name in "keep bf16 f32 q4 q5 q6 w8 nvfp4 fp8 fp8-block bridge-fp8 bridge-fp8-amax".split(' ') {
        assert!(name.parse::<Recipe>().is_ok());
        assert!(e.to_string().contains(name), "{e}");
    }
    assert!(matches!(e, Error::UnknownRecipe { .. }));
}

#[test]
fn recipes_are_serialised_by_name() {
    use serde::Deserialize;
    use serde::de::IntoDeserializer;
    use serde::de::value::{Error as ValueError, StrDeserializer};
    let read = |s: &'static str| {
        let d: StrDeserializer<'_, ValueError> = s.into_deserializer();
        Recipe::deserialize(d)
    };
    assert_eq!(read("bridge-fp8"), Ok(Recipe::BridgeFp8));
    assert!(read("fp9").unwrap_err().to_string().contains("fp8-block"));
}

#[test]
fn quantising_recipes_touch_the_projections_of_the_body() {
    let spared = [
        TensorRole::Embedding,
        TensorRole::Head,
        TensorRole::GdnA,
        TensorRole::GdnB,
        TensorRole::Router,
        TensorRole::SharedExpertGate,
        TensorRole::MtpFc,
    ];
    for name in ["q4", "q5", "q6", "w8", "nvfp4", "fp8", "fp8-block"] {
        let recipe: Recipe = name.parse().unwrap();
        for role in TensorRole::ALL {
            let touched = recipe.target(role, false, WeightFormat::Bf16) != Conversion::Keep;
            assert_eq!(touched, !spared.contains(&role), "{name} {role}");
            assert_eq!(recipe.target(role, true, WeightFormat::Bf16), Conversion::Keep);
        }
        let to = recipe.target(TensorRole::AttnQ, false, WeightFormat::Bf16).result(WeightFormat::Bf16);
        assert_eq!(to.name(), name);
        assert_eq!(recipe.target(TensorRole::AttnQ, false, to), Conversion::Keep);
    }
    for role in TensorRole::ALL {
        for mtp in [false, true] {
            assert_eq!(Recipe::Keep.target(role, mtp, WeightFormat::Nvfp4), Conversion::Keep);
            let bridge = Recipe::BridgeFp8.target(role, mtp, WeightFormat::Nvfp4);
            assert_eq!(bridge, Conversion::Bridge(BridgeScale::Pow2Row));
            assert_eq!(Recipe::BridgeFp8.target(role, mtp, WeightFormat::Fp8Tensor), Conversion::Keep);
            let bf16 = Recipe::Bf16.target(role, mtp, WeightFormat::Nvfp4);
            assert_eq!(bf16, Conversion::To(WeightFormat::Bf16));
            assert_eq!(Recipe::Bf16.target(role, mtp, WeightFormat::Bf16), Conversion::Keep);
        }
    }
}

#[test]
fn every_recipe_converts_every_stored_format() {
    let w = weights(9, 3 * 128);
    let formats = [
        WeightFormat::F32,
        WeightFormat::F16,
        WeightFormat::Bf16,
        WeightFormat::Fp8Tensor,
        WeightFormat::Fp8Row,
        WeightFormat::Fp8Block,
        WeightFormat::Nvfp4,
        WeightFormat::Group(GroupFormat::Q4),
        WeightFormat::Group(GroupFormat::W8),
    ];
    for stored in formats {
        let m = encode(stored, 3, 128, &w).unwrap();
        for recipe in Recipe::ALL {
            let target = recipe.target(TensorRole::ExpertUp, false, stored);
            let converted = convert(&m, &recipe, TensorRole::ExpertUp, false).unwrap();
            assert_eq!(converted.format(), target.result(stored), "{stored} {recipe}");
            assert_eq!(target.apply_ref(&m.as_ref()).unwrap(), converted);
            assert_eq!(target.apply_owned(m.clone()).unwrap(), converted);
            if target == Conversion::Keep {
                assert_eq!(converted, m);
            }
            let report = ErrorReport::between(&m, &converted).unwrap();
            // Four bits with one scale for 64 columns of this spread lose the most.
            assert!(report.relative_l2 < 0.2 && report.cosine > 0.98, "{stored} {recipe} {report:?}");
        }
        let kept = convert(&m, &Recipe::Nvfp4, TensorRole::Router, false).unwrap();
        assert_eq!(kept, m);
    }
}

#[test]
fn one_scale_becomes_one_per_row_without_rounding() {
    let m = encode(WeightFormat::Fp8Tensor, 4, 32, &weights(10, 128)).unwrap();
    let rows = convert(&m, &Recipe::Fp8, TensorRole::AttnOut, false).unwrap();
    assert_eq!(rows.format(), WeightFormat::Fp8Row);
    assert_eq!(rows.dequantize(), m.dequantize());
}

#[test]
fn the_bridge_recipes_are_the_bridge() {
    let m = encode(WeightFormat::Nvfp4, 4, 32, &weights(11, 128)).unwrap();
    let by = |name: &str| convert(&m, &name.parse().unwrap(), TensorRole::Head, false).unwrap();
    assert_eq!(by("bridge-fp8"), bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap());
    assert_eq!(by("bridge-fp8-amax"), bridge(&m.as_ref(), BridgeScale::AmaxRow).unwrap());
    assert_eq!(by("bridge-fp8-amax"), encode(WeightFormat::Fp8Row, 4, 32, &m.dequantize()).unwrap());
}
