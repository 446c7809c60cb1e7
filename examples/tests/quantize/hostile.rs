//! Damaged input: the error names the tensor or the file, and nothing is left of the output.

use std::path::Path;

use ninfer_examples::Failure;
use ninfer_models::Error;

use crate::tiny::{copy, failure, fixture, job, patch, run};

const NAN: [u8; 2] = 0x7FC0u16.to_le_bytes();
/// 2^100 in BF16.
const HUGE: [u8; 2] = (227u16 << 7).to_le_bytes();
/// 2^20 in BF16.
const LARGE: [u8; 2] = (147u16 << 7).to_le_bytes();

/// What converting a copy of a tiny model says after `change`.
fn says(name: &str, recipes: &str, change: impl Fn(&Path)) -> Failure {
    let model = copy(name);
    change(model.path());
    failure(&job(model.path(), &tempfile::tempdir().unwrap(), recipes))
}

#[test]
fn weights_that_are_not_numbers_are_named() {
    let cases = [
        ("tiny-dense", "q4", "model.language_model.layers.1.mlp.down_proj.weight"),
        ("tiny-dense", "q4", "model.language_model.embed_tokens.weight"),
        ("tiny-dense", "keep", "model.language_model.layers.1.mlp.down_proj.weight"),
        ("tiny-dense", "fp8", "model.language_model.layers.0.input_layernorm.weight"),
        ("tiny-dense", "keep", "mtp.fc.weight"),
        ("tiny-moe", "nvfp4", "model.language_model.layers.2.mlp.experts.gate_up_proj"),
        ("tiny-moe", "f32", "model.language_model.layers.2.mlp.experts.down_proj"),
        ("tiny-moe", "keep", "model.language_model.layers.0.mlp.experts.down_proj"),
    ];
    for (model, recipes, tensor) in cases {
        let failure = says(model, recipes, |dir| patch(dir, tensor, 5, &NAN));
        let module = tensor.trim_end_matches(".weight");
        assert!(failure.to_string().contains(module) && failure.to_string().contains("NaN"), "{failure}");
        assert!(
            matches!(&failure, Failure::Models(Error::Quant { .. } | Error::NonFinite { .. })),
            "{recipes} {tensor}: {failure:?}"
        );
    }
}

#[test]
fn weights_that_a_format_cannot_hold_are_named() {
    let tensor = "model.language_model.layers.1.mlp.up_proj.weight";
    let source = |recipes, value: [u8; 2]| match says("tiny-dense", recipes, |dir| patch(dir, tensor, 3, &value)) {
        Failure::Models(Error::Quant { module, source }) => {
            assert_eq!(module, tensor.trim_end_matches(".weight"));
            source
        }
        other => panic!("{other:?}"),
    };
    assert!(matches!(source("w8", HUGE), ninfer_quant::Error::Overflow { .. }));
    // A scale above 1 would be taken for a reciprocal when the file is loaded.
    assert!(matches!(source("fp8", LARGE), ninfer_quant::Error::SwappedScale { .. }));
}

#[test]
fn damaged_files_are_named() {
    let truncated = says("tiny-moe", "q4", |dir| {
        let path = dir.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    });
    assert!(matches!(truncated, Failure::Models(Error::Header { .. })), "{truncated}");
    let no_config = says("tiny-moe", "q4", |dir| std::fs::remove_file(dir.join("config.json")).unwrap());
    assert!(no_config.to_string().contains("config.json"), "{no_config}");

    let folder = tempfile::tempdir().unwrap();
    let mut sharded = job(&fixture("tiny-moe"), &folder, "keep");
    sharded.shard_bytes = 50_000;
    run(&sharded).unwrap();
    let files = std::fs::read_dir(&sharded.output).unwrap().map(|e| e.unwrap().path());
    let second = files.into_iter().find(|p| p.to_string_lossy().contains("model-00002-of-")).unwrap();
    std::fs::remove_file(second).unwrap();
    let missing = failure(&job(&sharded.output, &tempfile::tempdir().unwrap(), "q4"));
    assert!(matches!(&missing, Failure::Models(Error::MissingShard { .. })), "{missing}");
    assert!(missing.to_string().contains("model-00002"), "{missing}");
}

#[test]
fn folders_that_cannot_be_written_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(&fixture("tiny-tied"), &folder, "q4");
    job.output = folder.path().join("no/such/place");
    let failure = run(&job).unwrap_err();
    assert!(
        matches!(&failure, Failure::Unwritable { .. }) && failure.to_string().contains("place.partial"),
        "{failure}"
    );
    job.output = "/".into();
    assert!(matches!(run(&job).unwrap_err(), Failure::Usage { .. }));
}
