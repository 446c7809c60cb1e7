//! `quantization_config`: how the weights are stored, in the words of the library whose convention they follow.

use ninfer_core::format::ActivationPrecision;
use ninfer_models::weights::WeightTable;
use ninfer_quant::TensorRole;
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::writer::BlockScaleName;
use serde_json::{Map, Value, json};

use super::names::patterns;
use super::plan::Plan;
use crate::recipes::Recipes;

/// The key in `config.json`.
pub(super) const KEY: &str = "quantization_config";

/// Name of the precision of inputs that are not quantised.
const NATIVE: &str = ActivationPrecision::Native.name();
/// Name of the precision of inputs that other engines know.
const TOKEN: &str = ActivationPrecision::E4m3Token.name();

/// Which convention a file follows as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Convention {
    /// FP8 blocks with `weight_scale_inv`, as Qwen releases them.
    Fp8,
    CompressedTensors,
    /// Anything with groupwise integers, or with several libraries' conventions side by side.
    Own,
}

/// A class of modules, in the order in which configurations list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Plain,
    Fp8Tensor,
    Fp8Row,
    Fp8Block,
    Nvfp4,
    /// Of the same format as the class before, in the multiplying convention.
    Nvfp4Multiplying,
    Group(&'static str),
}

fn class(kind: StoredKind) -> Class {
    match kind {
        StoredKind::Fp8Tensor => Class::Fp8Tensor,
        StoredKind::Fp8Row => Class::Fp8Row,
        StoredKind::Fp8Block => Class::Fp8Block,
        StoredKind::Nvfp4CompressedTensors => Class::Nvfp4,
        StoredKind::Nvfp4ModelOpt => Class::Nvfp4Multiplying,
        StoredKind::Groupwise(_) => Class::Group(kind.name()),
        _ => Class::Plain,
    }
}

impl Class {
    /// Format names and weight arguments of compressed-tensors; none for what it does not have.
    fn compressed_tensors(self) -> Option<(&'static str, Value)> {
        let weights = |bits: u8, strategy: &str| json!({ "num_bits": bits, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": false });
        let mut block = weights(8, "block");
        block["block_structure"] = json!([128, 128]);
        let mut group = weights(4, "tensor_group");
        group["group_size"] = json!(16);
        group["scale_dtype"] = json!("torch.float8_e4m3fn");
        Some(match self {
            Self::Fp8Tensor => ("float-quantized", weights(8, "tensor")),
            Self::Fp8Row => ("float-quantized", weights(8, "channel")),
            Self::Fp8Block => ("float-quantized", block),
            Self::Nvfp4 => ("nvfp4-pack-quantized", group),
            Self::Plain | Self::Nvfp4Multiplying | Self::Group(_) => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Fp8Tensor => "fp8-tensor",
            Self::Fp8Row => "fp8",
            Self::Fp8Block => "fp8-block",
            Self::Nvfp4 => "nvfp4",
            Self::Nvfp4Multiplying => "nvfp4-multiplying",
            Self::Group(name) => name,
        }
    }
}

pub(super) fn quantization_config(table: &WeightTable, plan: &Plan, recipes: &Recipes) -> Option<Value> {
    let classes: Vec<Class> = plan.modules().map(|(_, _, piece)| class(piece.kind)).collect();
    let quantised = |c: &&Class| **c != Class::Plain;
    if plan.is_copy() || !classes.iter().any(|c| quantised(&c)) {
        return None;
    }
    let all = |ok: fn(&Class) -> bool| classes.iter().filter(quantised).all(ok);
    let convention = if plan.blocks == BlockScaleName::WeightScaleInv {
        Convention::Fp8
    } else if all(|c| c.compressed_tensors().is_some()) {
        Convention::CompressedTensors
    } else {
        Convention::Own
    };
    Some(match convention {
        Convention::Fp8 => fp8(table, plan),
        Convention::CompressedTensors => compressed_tensors(table, plan),
        Convention::Own => own(plan, recipes),
    })
}

/// Whether the MTP block has no quantised matrix. None at all counts as well.
fn mtp_is_plain(plan: &Plan) -> bool {
    plan.modules().filter(|(place, ..)| place.layer.is_mtp()).all(|(_, _, piece)| class(piece.kind) == Class::Plain)
}

/// What the vision tower's tensors start with, if there is one.
fn vision(table: &WeightTable) -> Option<&'static str> {
    let stems = ["model.visual", "visual", "vision_tower"];
    let has = |stem: &&str| {
        let below = |name: &str| name.strip_prefix(*stem).is_some_and(|rest| rest.starts_with('.'));
        table.checkpoint().tensors().iter().any(|t| below(t.name()))
    };
    stems.into_iter().find(has)
}

fn fp8(table: &WeightTable, plan: &Plan) -> Value {
    let folded = mtp_is_plain(plan);
    let mut names: Vec<String> = Vec::new();
    for (place, name, piece) in plan.modules() {
        if class(piece.kind) == Class::Plain && !(folded && place.layer.is_mtp()) {
            names.push(name);
        }
    }
    if table.shares_head() {
        names.push("lm_head".to_owned());
    }
    if folded {
        names.push("mtp".to_owned());
    }
    names.extend(vision(table).map(str::to_owned));
    json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": names,
    })
}

fn compressed_tensors(table: &WeightTable, plan: &Plan) -> Value {
    let folded = mtp_is_plain(plan);
    let modules = plan.modules().filter(|(place, _, piece)| {
        let plain = class(piece.kind) == Class::Plain;
        // An embedding is no linear layer; it is named only where it is quantised.
        !(plain && (place.role == TensorRole::Embedding || (folded && place.layer.is_mtp())))
    });
    let mut classes = patterns(modules.map(|(_, name, piece)| (name, (class(piece.kind), piece.activations.name()))));
    let mut ignore = classes.remove(&(Class::Plain, NATIVE)).unwrap_or_default();
    if table.shares_head() {
        ignore.push("re:.*lm_head$".to_owned());
    }
    if folded {
        ignore.push(r"re:.*mtp\..*".to_owned());
    }
    ignore.extend(vision(table).map(|stem| format!("re:.*{}.*", stem.replace('.', r"\."))));
    let (mut groups, mut formats) = (Map::new(), Vec::new());
    for ((class, activations), targets) in classes {
        let inputs = (activations == TOKEN).then(
            || json!({ "num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true }),
        );
        let Some((format, weights)) = class.compressed_tensors() else { continue };
        formats.push(format);
        let group = json!({
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": null,
            "format": format,
        });
        groups.insert(format!("group_{}", groups.len()), group);
    }
    let format = match formats.as_slice() {
        [first, rest @ ..] if rest.iter().all(|f| f == first) => first,
        _ => "mixed-precision",
    };
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": kv_cache_scheme(table),
    })
}

/// What the input says about the scales of its KV cache, which are copied.
fn kv_cache_scheme(table: &WeightTable) -> Value {
    let text = std::fs::read(table.checkpoint().dir().join(super::CONFIG_FILE)).unwrap_or_default();
    let config: Value = serde_json::from_slice(&text).unwrap_or_default();
    let section = config.get(KEY).or_else(|| config.get("text_config")?.get(KEY));
    section.and_then(|s| s.get("kv_cache_scheme")).cloned().unwrap_or_default()
}

fn own(plan: &Plan, recipes: &Recipes) -> Value {
    let classes = patterns(plan.modules().map(|(_, name, piece)| (name, class(piece.kind))));
    let modules: Map<String, Value> =
        classes.into_iter().map(|(class, patterns)| (class.name().to_owned(), json!(patterns))).collect();
    json!({
        "quant_method": "ninfer",
        "version": 1,
        "recipe": recipes,
        "modules": modules,
    })
}
