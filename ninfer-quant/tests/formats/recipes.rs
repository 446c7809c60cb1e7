//! Recipes: names, what they touch, and what they make.

use ninfer_core::format::{ActivationPrecision, GroupFormat};
use ninfer_core::shape::{self, Part, Role};
use ninfer_core::{Error as CoreError, WeightFormat};
use ninfer_quant::bridge::{BridgeScale, bridge};
use ninfer_quant::{Conversion, Error, ErrorReport, Recipe, RowPart, Site, Target, TensorRole, convert, encode};

use crate::fixtures::weights;

fn body(role: TensorRole) -> Site {
    Site::new(role, Part::Layer(0), 2, true)
}

fn mtp(role: TensorRole) -> Site {
    Site::new(role, Part::Mtp, 2, true)
}

#[test]
fn names_round_trip_and_the_error_lists_them() {
    for r in Recipe::ALL {
        assert_eq!(r.to_string().parse::<Recipe>().unwrap(), r);
    }
    let e = "Q4".parse::<Recipe>().unwrap_err();
    let names = "keep bf16 f32 q4 q5 q6 w8 groupwise nvfp4 nvfp4-a4 fp8 fp8-a8 fp8-block fp8-block-a8 bridge-fp8 bridge-fp8-a8 \
                 bridge-fp8-block bridge-fp8-block-a8 bridge-fp8-amax bridge-fp8-amax-a8";
    for name in names.split_whitespace() {
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
    assert_eq!(read("nvfp4,bridge-fp8-a8").unwrap().to_string(), "nvfp4,bridge-fp8-a8");
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
    for name in ["q4", "q5", "q6", "w8", "nvfp4", "nvfp4-a4", "fp8", "fp8-block", "fp8-a8", "fp8-block-a8"] {
        let recipe: Recipe = name.parse().unwrap();
        for role in TensorRole::ALL {
            let target = recipe.target(&body(role), WeightFormat::Bf16);
            assert_eq!(!target.keeps(), !spared.contains(&role), "{name} {role}");
            assert!(recipe.target(&mtp(role), WeightFormat::Bf16).keeps());
        }
        let target = recipe.target(&body(TensorRole::AttnQ), WeightFormat::Bf16);
        let to = target.result(WeightFormat::Bf16);
        assert_eq!(to.name(), name.trim_end_matches("-a8").trim_end_matches("-a4"));
        let again = recipe.target(&body(TensorRole::AttnQ), to);
        assert!(again.steps().is_empty());
        let precision = match name.rsplit_once("-a") {
            Some((_, "8")) => ActivationPrecision::E4m3Token,
            Some((_, "4")) => ActivationPrecision::E2m1Group16,
            _ => ActivationPrecision::Native,
        };
        assert_eq!((again.activations(to), target.activations(WeightFormat::Bf16)), (precision, precision));
    }
    for role in TensorRole::ALL {
        for site in [body(role), mtp(role)] {
            assert!(Recipe::Keep.target(&site, WeightFormat::Nvfp4).keeps());
            let bridge = Recipe::BridgeFp8.target(&site, WeightFormat::Nvfp4);
            assert_eq!(bridge, Conversion::Bridge(BridgeScale::Pow2Row).into());
            assert!(Recipe::BridgeFp8.target(&site, WeightFormat::Fp8Tensor).keeps());
            assert_eq!(Recipe::Bf16.target(&site, WeightFormat::Nvfp4), Conversion::To(WeightFormat::Bf16).into());
            assert!(Recipe::Bf16.target(&site, WeightFormat::Bf16).keeps());
        }
    }
}

/// Inputs become codes only where large projections multiply FP8: not in the head, and not in the MTP block.
#[test]
fn bridges_with_a8_leave_head_and_mtp_block_native() {
    for (recipe, format) in [
        (Recipe::BridgeFp8A8, WeightFormat::Fp8Row),
        (Recipe::BridgeFp8BlockA8, WeightFormat::Fp8Block),
        (Recipe::BridgeFp8AmaxA8, WeightFormat::Fp8Row),
    ] {
        for role in TensorRole::ALL {
            for site in [body(role), mtp(role)] {
                let coded = site.is_body_projection();
                for stored in [WeightFormat::Nvfp4, WeightFormat::Fp8Row, WeightFormat::Fp8Tensor, WeightFormat::Bf16] {
                    let target = recipe.target(&site, stored);
                    let coded = coded && stored != WeightFormat::Bf16;
                    let expected = if coded { ActivationPrecision::E4m3Token } else { ActivationPrecision::Native };
                    assert_eq!(target.activations(stored), expected, "{recipe} {site} {stored}");
                    let result = if stored == WeightFormat::Nvfp4 { format } else { stored };
                    assert_eq!(target.result(stored), result);
                }
            }
        }
    }
}

#[test]
fn recipes_in_a_row() {
    let site = body(TensorRole::MlpUp);
    let m = encode(WeightFormat::Bf16, 4, 64, &weights(4, 256)).unwrap();
    let both: Recipe = "nvfp4,bridge-fp8-a8".parse().unwrap();
    let converted = convert(&m, &both, &site).unwrap();
    assert_eq!((converted.format(), converted.activations()), (WeightFormat::Fp8Row, ActivationPrecision::E4m3Token));
    let first = convert(&m, &Recipe::Nvfp4, &site).unwrap();
    assert_eq!(converted, convert(&first, &Recipe::BridgeFp8A8, &site).unwrap());
    assert!(both.target(&body(TensorRole::Router), WeightFormat::Bf16).keeps());
    // What the first made stays where the second says nothing, and its activations end with its format.
    let recipe: Recipe = "fp8-a8,bridge-fp8".parse().unwrap();
    assert_eq!(recipe.target(&site, m.format()).activations(m.format()), ActivationPrecision::E4m3Token);
    let recipe: Recipe = "fp8-a8,bf16".parse().unwrap();
    assert_eq!(convert(&m, &recipe, &site).unwrap().activations(), ActivationPrecision::Native);
    for text in ["", "nvfp5", "nvfp4,", "nvfp4, fp8"] {
        assert!(matches!(text.parse::<Recipe>(), Err(Error::UnknownRecipe { .. })), "{text}");
    }
    let impossible = Target::from(Conversion::To(WeightFormat::Bf16)).with_activations(ActivationPrecision::E4m3Token);
    assert_eq!(impossible.apply(&m).unwrap(), m);
    let error = m.with_activations(ActivationPrecision::E4m3Token).unwrap_err();
    assert!(matches!(error, Error::Core(CoreError::Unsupported { .. })));
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
    let site = body(TensorRole::ExpertUp);
    for stored in formats {
        let m = encode(stored, 3, 128, &w).unwrap();
        for recipe in Recipe::ALL {
            let target = recipe.target(&site, stored);
            let converted = convert(&m, &recipe, &site).unwrap();
            assert_eq!(converted.format(), target.result(stored), "{stored} {recipe}");
            assert_eq!(converted.activations(), target.activations(stored), "{stored} {recipe}");
            assert_eq!(target.apply_ref(&m.as_ref()).unwrap(), converted);
            assert_eq!(target.apply_owned(m.clone()).unwrap(), converted);
            if target.keeps() {
                assert_eq!(converted, m);
            }
            let report = ErrorReport::between(&m, &converted).unwrap();
            // Four bits with one scale for 64 columns of this spread lose the most.
            assert!(report.relative_l2 < 0.2 && report.cosine > 0.98, "{stored} {recipe} {report:?}");
        }
        let kept = convert(&m, &Recipe::Nvfp4, &body(TensorRole::Router)).unwrap();
        assert_eq!(kept, m);
    }
}

#[test]
fn one_scale_becomes_one_per_row_without_rounding() {
    let m = encode(WeightFormat::Fp8Tensor, 4, 32, &weights(10, 128)).unwrap();
    let rows = convert(&m, &Recipe::Fp8, &body(TensorRole::AttnOut)).unwrap();
    assert_eq!(rows.format(), WeightFormat::Fp8Row);
    assert_eq!(rows.dequantize(), m.dequantize());
}

#[test]
fn the_bridge_recipes_are_the_bridge() {
    let m = encode(WeightFormat::Nvfp4, 4, 32, &weights(11, 128)).unwrap();
    let head = Site::new(TensorRole::Head, Part::Head, 2, true);
    let by = |name: &str| convert(&m, &name.parse().unwrap(), &head).unwrap();
    assert_eq!(by("bridge-fp8"), bridge(&m.as_ref(), BridgeScale::Pow2Row).unwrap());
    assert_eq!(by("bridge-fp8-block"), bridge(&m.as_ref(), BridgeScale::Pow2Block).unwrap());
    assert_eq!(by("bridge-fp8-amax"), bridge(&m.as_ref(), BridgeScale::AmaxRow).unwrap());
    assert_eq!(by("bridge-fp8-amax"), encode(WeightFormat::Fp8Row, 4, 32, &m.dequantize()).unwrap());
}

/// Formats by planned role, outside and inside the MTP block, as NInfer's inventories list them.
#[test]
fn groupwise_formats_follow_the_role() {
    const DENSE: [(Role, &str); 17] = [
        (Role::Embedding, "q6"),
        (Role::Head, "q6"),
        (Role::AttnQuery, "q5"), // q4 there: see the documentation of `Recipe`
        (Role::AttnGate, "q5"),
        (Role::AttnKey, "q4"),
        (Role::AttnValue, "q5"),
        (Role::AttnOut, "q5"),
        (Role::GdnQueryKey, "q4"),
        (Role::GdnValue, "q5"),
        (Role::GdnZ, "q5"),
        (Role::GdnA, "bf16"),
        (Role::GdnB, "bf16"),
        (Role::GdnOut, "q5"),
        (Role::FfnGate, "q4"),
        (Role::FfnUp, "q4"),
        (Role::FfnDown, "q5"),
        (Role::MtpFc, "w8"),
    ];
    const EXPERTS: [(Role, &str); 21] = [
        (Role::Embedding, "w8"),
        (Role::Head, "q6"),
        (Role::AttnQuery, "w8"),
        (Role::AttnGate, "w8"),
        (Role::AttnKey, "w8"),
        (Role::AttnValue, "w8"),
        (Role::AttnOut, "w8"),
        (Role::GdnQueryKey, "w8"),
        (Role::GdnValue, "w8"),
        (Role::GdnZ, "w8"),
        (Role::GdnA, "bf16"),
        (Role::GdnB, "bf16"),
        (Role::GdnOut, "w8"),
        (Role::Router, "bf16"),
        (Role::ExpertGate, "q4"),
        (Role::ExpertUp, "q4"),
        (Role::SharedGate, "w8"),
        (Role::SharedUp, "w8"),
        (Role::SharedDown, "w8"),
        (Role::SharedScale, "bf16"),
        (Role::MtpFc, "w8"),
    ];
    for name in shape::PUBLISHED {
        let shape = shape::published(name).unwrap();
        let dense = matches!(shape.ffn, shape::FfnShape::Dense { .. });
        let table = if dense { &DENSE[..] } else { &EXPERTS[..] };
        let format = Recipe::Groupwise.formats(&shape, |_| WeightFormat::Bf16);
        for t in shape.tensors() {
            let expected = match (t.role, t.part) {
                (role, _) if !role.is_matrix() => "f32",
                (Role::Router | Role::SharedScale | Role::GdnA | Role::GdnB, _) => "bf16",
                (_, Part::Mtp) => "w8",
                (Role::ExpertDown, Part::Layer(i)) if [1, 2, 6].contains(&(shape.layers.len() - i)) => "q6",
                (Role::ExpertDown, _) => "q5",
                (role, _) => table.iter().find(|(r, _)| *r == role).unwrap().1,
            };
            assert_eq!(format(&t).name(), expected, "{name} {:?} {}", t.part, t.role);
        }
    }
    let shape = shape::published("35b-a3b").unwrap();
    let format = Recipe::Groupwise.formats(&shape, |_| WeightFormat::Bf16);
    let six_bits = WeightFormat::Group(GroupFormat::Q6);
    let wide: Vec<Part> =
        shape.tensors().filter(|t| t.role == Role::ExpertDown && format(t) == six_bits).map(|t| t.part).collect();
    assert_eq!(wide, [34, 38, 39].map(Part::Layer));
}

/// Query and key rows of `in_proj_qkv` get fewer bits than its value rows, and both are what they are alone.
#[test]
fn rows_of_one_matrix_may_end_in_different_formats() {
    let site = Site::new(TensorRole::GdnQkv, Part::Layer(0), 4, false);
    for stored in [WeightFormat::Bf16, WeightFormat::Nvfp4, WeightFormat::Fp8Block, WeightFormat::Fp8Tensor] {
        let m = encode(stored, 200, 64, &weights(13, 200 * 64)).unwrap();
        let parts = [(RowPart::QueryKey, 130), (RowPart::Value, 70)];
        let stack = Recipe::Groupwise.convert_stack(m.clone(), &site, &parts).unwrap();
        let [query_key, value] = &stack[..] else { panic!("{} pieces", stack.len()) };
        assert_eq!((query_key.format().name(), query_key.rows()), ("q4", 130));
        assert_eq!((value.format().name(), value.rows()), ("q5", 70));
        let w = m.dequantize();
        assert_eq!(query_key, &encode(query_key.format(), 130, 64, &w[..130 * 64]).unwrap());
        assert_eq!(value, &encode(value.format(), 70, 64, &w[130 * 64..]).unwrap());
        // A recipe that makes no difference gives one piece, and so does a list without parts.
        for parts in [&parts[..], &[]] {
            let whole = Recipe::Group(GroupFormat::W8).convert_stack(m.clone(), &site, parts).unwrap();
            assert_eq!(whole, [convert(&m, &Recipe::Group(GroupFormat::W8), &site).unwrap()]);
        }
        let none = Recipe::Groupwise.convert_stack(m, &site, &[(RowPart::QueryKey, 0), (RowPart::Value, 0)]);
        assert!(matches!(none, Err(Error::Length { .. })));
    }
}
