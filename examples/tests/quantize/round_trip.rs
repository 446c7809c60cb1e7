//! What is written loads as what conversion at load gives.

use ninfer_examples::recipes::{Converted, Recipes};
use ninfer_models::qwen35::WeightSource;
use ninfer_models::weights::{EntryRole, ExpertPart, WeightTable};
use ninfer_quant::TensorRole;
use serde_json::Value;

use crate::tiny::{MODELS, fixture, job, run};

/// Recipes with the method that the configuration announces for them.
const RECIPES: [(&str, Option<&str>); 18] = [
    ("keep", None),
    ("bf16", None),
    ("f32", None),
    ("q4", Some("ninfer")),
    ("q5", Some("ninfer")),
    ("q6", Some("ninfer")),
    ("w8", Some("ninfer")),
    ("nvfp4", Some("compressed-tensors")),
    ("fp8", Some("compressed-tensors")),
    ("fp8-block", Some("fp8")),
    ("nvfp4,bridge-fp8", Some("compressed-tensors")),
    ("nvfp4,bridge-fp8-amax", Some("compressed-tensors")),
    ("bridge-fp8", None),
    ("groupwise", Some("ninfer")),
    ("nvfp4,bridge-fp8-block", Some("fp8")),
    ("fp8-a8", Some("compressed-tensors")),
    ("fp8-block-a8", Some("compressed-tensors")),
    ("nvfp4,bridge-fp8-a8", Some("compressed-tensors")),
];

/// Every weight of a table through `recipes`, in the order of its entries.
fn weights(table: &WeightTable, recipes: &Recipes) -> Vec<String> {
    let source = Converted::new(table, recipes, true);
    let mut entries = table.entries();
    // Split experts have a line for each format, fused ones one for all: only the roles count.
    entries.sort_by_key(|e| (e.layer, format!("{:?}", e.role)));
    entries.dedup_by_key(|e| (e.layer, e.role));
    let weight = |entry: &ninfer_models::weights::Entry| match entry.role {
        EntryRole::Vector(role) => format!("{:?}", source.vector(entry.layer, role).unwrap()),
        EntryRole::Matrix(TensorRole::ExpertGate | TensorRole::ExpertUp) => {
            format!("{:?}", source.experts(entry.layer, ExpertPart::GateUp).unwrap())
        }
        EntryRole::Matrix(TensorRole::ExpertDown) => {
            format!("{:?}", source.experts(entry.layer, ExpertPart::Down).unwrap())
        }
        EntryRole::Matrix(role) => format!("{:?}", source.stack(entry.layer, role).unwrap()),
        _ => panic!("{entry:?}"),
    };
    entries.iter().map(|entry| format!("{} {}: {}", entry.layer, entry.role, weight(entry))).collect()
}

#[test]
fn every_recipe_loads_as_at_load() {
    for model in MODELS {
        let source = WeightTable::open(fixture(model)).unwrap();
        for (recipes, method) in RECIPES {
            let folder = tempfile::tempdir().unwrap();
            let mut job = job(&fixture(model), &folder, recipes);
            // Some outputs in one file, some in many.
            job.shard_bytes = if recipes.len() % 2 == 0 { 50_000 } else { 1 << 30 };
            let summary = run(&job).unwrap();
            let written = WeightTable::open(&job.output).unwrap_or_else(|e| panic!("{model} {recipes}: {e}"));
            assert_eq!(written.mtp(), source.mtp());
            assert_eq!(written.shares_head(), source.shares_head());
            // Which precision inputs have is said when a model is loaded; codes stay as they are then.
            let again = if recipes.ends_with("-a8") { "fp8-a8" } else { "keep" };
            let again = if recipes == "fp8-block-a8" { "fp8-block-a8" } else { again }.parse().unwrap();
            let (expected, got) = (weights(&source, &job.recipes), weights(&written, &again));
            assert_eq!(expected.len(), got.len());
            for (a, b) in expected.iter().zip(&got) {
                assert!(a == b, "{model} {recipes}: {} is not {}", &b[..b.len().min(300)], &a[..a.len().min(300)]);
            }

            let config: Value =
                serde_json::from_slice(&std::fs::read(job.output.join("config.json")).unwrap()).unwrap();
            let announced = config.get("quantization_config").map(|c| c["quant_method"].as_str().unwrap());
            assert_eq!(announced, method, "{model} {recipes}");
            assert_eq!(summary.converted().is_empty(), method.is_none() && recipes != "f32", "{recipes}");
            let files = job.plan().unwrap().files().unwrap();
            assert_eq!(files.len() > 1, job.shard_bytes < 1 << 30);
            for (name, bytes) in files {
                assert_eq!(std::fs::metadata(job.output.join(&name)).unwrap().len(), bytes, "{name}");
                assert!(bytes < 120_000 || job.shard_bytes > 50_000, "{name}: {bytes}");
            }
            assert!(job.output.join("generation_config.json").is_file());
        }
    }
}

#[test]
fn a_conversion_can_go_on_from_a_converted_folder() {
    let folder = tempfile::tempdir().unwrap();
    let first = job(&fixture("tiny-moe"), &folder, "nvfp4");
    run(&first).unwrap();
    let second_folder = tempfile::tempdir().unwrap();
    let second = job(&first.output, &second_folder, "bridge-fp8");
    run(&second).unwrap();
    let both = "nvfp4,bridge-fp8".parse().unwrap();
    let expected = weights(&WeightTable::open(fixture("tiny-moe")).unwrap(), &both);
    assert!(expected == weights(&WeightTable::open(&second.output).unwrap(), &Recipes::default()));

    // Back to plain weights: no configuration of a format that is gone, and experts that stay as they were cut.
    let third_folder = tempfile::tempdir().unwrap();
    let third = job(&second.output, &third_folder, "bf16");
    run(&third).unwrap();
    let config = std::fs::read_to_string(third.output.join("config.json")).unwrap();
    assert!(!config.contains("quantization_config"), "{config}");
    let plan = job(&third.output, &folder, "keep");
    assert!(plan.plan().unwrap().plan().is_copy());
}

#[test]
fn unchanged_folders_are_copied_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(&fixture("tiny-moe"), &folder, "keep");
    run(&job).unwrap();
    let read = |dir: &std::path::Path, name: &str| std::fs::read(dir.join(name)).unwrap();
    assert_eq!(read(&job.output, "config.json"), read(&fixture("tiny-moe"), "config.json"));
    let (a, b) = (read(&job.output, "model.safetensors"), read(&fixture("tiny-moe"), "model.safetensors"));
    let (a, b) =
        (safetensors::SafeTensors::deserialize(&a).unwrap(), safetensors::SafeTensors::deserialize(&b).unwrap());
    assert_eq!(a.len(), b.len());
    for (name, t) in b.iter() {
        let copy = a.tensor(name).unwrap();
        assert!((copy.dtype(), copy.shape(), copy.data()) == (t.dtype(), t.shape(), t.data()), "{name}");
        assert_eq!(copy.data().as_ptr() as usize % t.dtype().bitsize().div_ceil(8), 0, "{name} is not aligned");
    }
}

#[test]
fn errors_are_those_of_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixture("tiny-moe");
    let job = job(&model, &folder, "q4");
    let summary = run(&job).unwrap();
    let table = WeightTable::open(&model).unwrap();
    let places = table.places();
    assert!(!summary.converted().is_empty());
    for converted in summary.converted() {
        let place = places.iter().find(|p| p.name == converted.name).unwrap();
        let stored = table.read_place(place).unwrap();
        let q4 = job.recipes.apply(&stored, &table.site_of(place).0).unwrap();
        assert_eq!(converted.error(), ninfer_quant::ErrorReport::between(&stored, &q4).unwrap());
        assert_eq!(converted.output_bytes, q4.bytes() as u64);
        assert!((0.02..0.2).contains(&converted.error().relative_l2), "{converted:?}");
    }
    let json = summary.json();
    assert_eq!(json["matrices"].as_array().unwrap().len(), summary.converted().len());
    assert!(json["all"]["cosine"].as_f64().unwrap() > 0.98);
}
