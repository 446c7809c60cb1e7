//! `quantize`.

use serde_json::{Value, json};

use crate::program::{folder, path, run};

const QUANTIZE: &str = env!("CARGO_BIN_EXE_quantize");
const PERPLEXITY: &str = env!("CARGO_BIN_EXE_perplexity");

#[test]
fn the_shipped_model_is_converted_and_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (out, report) = (folder.path().join("q5"), folder.path().join("report.json"));
    let text = run(QUANTIZE, &["--weights", "q5", "--output", path(&out), "--report", path(&report)]);
    assert_eq!((text.status, text.stderr.as_str()), (0, ""));
    for words in ["model.layers.*.mlp.experts.*.gate_proj", "relative L2", "242", "27.56 MiB read", "one file"] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(report["matrices"].as_array().unwrap().len(), 242);
    assert_eq!((&report["weights"], &report["quantization_config"]["quant_method"]), (&json!("q5"), &json!("ninfer")));
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"] {
        assert!(out.join(name).is_file(), "{name}");
    }

    let measure = |more: &[&str]| run(PERPLEXITY, &[&["--max-tokens", "256", "--json"], more].concat()).json();
    let (written, at_load) = (measure(&["--model", path(&out)]), measure(&["--weights", "q5"]));
    assert_eq!((&written["nll"], &written["weight_bytes"]), (&at_load["nll"], &at_load["weight_bytes"]));
}

#[test]
fn a_dry_run_writes_nothing_and_says_what_a_run_does() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let arguments = ["--weights", "nvfp4", "--output", path(&out), "--shard-size", "4MB", "--json"];
    let dry = run(QUANTIZE, &[&arguments[..], &["--dry-run"]].concat()).json();
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let real = run(QUANTIZE, &arguments).json();
    for key in ["files", "output_bytes", "input_bytes", "quantization_config", "weights"] {
        assert_eq!(dry[key], real[key], "{key}");
    }
    let files = dry["files"].as_array().unwrap();
    assert!(files.len() > 2 && out.join("model.safetensors.index.json").is_file());
    for file in files {
        let bytes = std::fs::metadata(out.join(file["name"].as_str().unwrap())).unwrap().len();
        assert_eq!(json!(bytes), file["bytes"]);
    }
    let text = run(QUANTIZE, &["--weights", "nvfp4", "--output", path(&out), "--dry-run"]);
    assert_eq!(text.status, 0);
    for words in ["NVFP4 (compressed-tensors)", "242", "model.safetensors", "compressed-tensors"] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    let folder = folder();
    let model = path(folder.path()).to_owned();
    let out = folder.path().join("out");
    let out = path(&out);
    run(QUANTIZE, &["--weights", "q4"]).fails(2, &["--output"]);
    run(QUANTIZE, &["--output", out]).fails(2, &["--weights"]);
    run(QUANTIZE, &["--weights", "q4", "--output", out, "--shard-size", "0"]).fails(2, &["--shard-size", "512MiB"]);
    run(QUANTIZE, &["--weights", "q4", "--output", out, "--dry-run", "--report", "a"]).fails(2, &["--report"]);
    run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", &model]).fails(2, &["--output"]);
    run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", &model, "--force"]).fails(2, &["--output"]);
    let missing = folder.path().join("no/such/place");
    run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", path(&missing)]).fails(1, &["place.partial"]);
    run(QUANTIZE, &["--model", out, "--weights", "q4", "--output", out]).fails(1, &["config.json"]);

    assert_eq!(run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", out]).status, 0);
    run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", out]).fails(1, &["exists", "--force"]);
    assert_eq!(run(QUANTIZE, &["--model", &model, "--weights", "w8", "--output", out, "--force"]).status, 0);

    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    run(QUANTIZE, &["--model", &model, "--weights", "q4", "--output", out, "--force"])
        .fails(1, &["model.safetensors", "truncated"]);
    // The output of before is still there.
    assert!(std::path::Path::new(out).join("config.json").is_file());
}

#[cfg(target_os = "linux")]
#[test]
fn full_disks_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    run(QUANTIZE, &["--weights", "q4", "--output", path(&out), "--report", "/dev/full"])
        .fails(1, &["cannot write /dev/full", "free space"]);
}
