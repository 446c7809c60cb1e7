//! `inspect`.

use serde_json::{Value, json};

use crate::program::{file, folder, path, run};

const INSPECT: &str = env!("CARGO_BIN_EXE_inspect");

fn device<'a>(json: &'a Value, name: &str) -> &'a Value {
    json["devices"].as_array().unwrap().iter().find(|d| d["device"] == name).unwrap()
}

#[test]
fn the_shipped_model_is_described() {
    let text = run(INSPECT, &[]);
    assert_eq!((text.status, text.stderr.as_str()), (0, ""));
    for words in [
        "6 Gated DeltaNet, 2 full attention",
        "tied to the embedding",
        "MTP block   complete",
        "every Gated DeltaNet head decays",
        "model.layers.*.mlp.experts.gate_up_proj",
        "14,450,736 parameters",
        "rollback records",
        "this CPU",
        "rtx5090",
        "gb10",
    ] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }

    let json = run(INSPECT, &["--json", "--device-profile", "h200"]).json();
    assert_eq!(json["parameters"]["total"], 14_450_736);
    assert_eq!(
        (&json["mtp"], &json["head"], &json["non_decaying_heads"]),
        (&json!("complete"), &json!("tied"), &json!([]))
    );
    assert_eq!(json["inventory"]["parameters"], 14_450_736);
    let groups = json["inventory"]["groups"].as_array().unwrap();
    let sum = |member: &str| groups.iter().map(|g| g[member].as_u64().unwrap()).sum::<u64>();
    assert_eq!(json!(sum("bytes")), json["inventory"]["bytes"]);
    // Everything but vectors and `A_log` stays BF16.
    assert_eq!(json["inventory"]["bytes"], 2 * 14_450_736);
    assert_eq!(json!(sum("loaded_bytes")), json["inventory"]["loaded_bytes"]);
    let memory = &device(&json, "h200")["memory"];
    assert_eq!(
        json!(memory["weights"].as_u64().unwrap() + memory["mtp_weights"].as_u64().unwrap()),
        json["inventory"]["loaded_bytes"]
    );
    assert_eq!(json["devices"].as_array().unwrap().len(), 1);
}

#[test]
fn recipes_change_what_is_loaded() {
    let json = run(INSPECT, &["--json", "--weights", "q4", "--device-profile", "gb10"]).json();
    let groups = json["inventory"]["groups"].as_array().unwrap();
    let loaded = |role: &str, name: &str| {
        groups.iter().find(|g| g["role"] == role && g["name"].as_str().unwrap().starts_with(name)).unwrap()["loaded"]
            .clone()
    };
    assert_eq!((loaded("expert.down", "model."), loaded("expert.down", "mtp.")), (json!("q4"), json!("bf16")));
    assert_eq!((loaded("embedding", "model."), loaded("gdn.qkv", "model.")), (json!("bf16"), json!("q4")));
    let memory = &device(&json, "gb10")["memory"];
    assert_eq!(
        json!(memory["weights"].as_u64().unwrap() + memory["mtp_weights"].as_u64().unwrap()),
        json["inventory"]["loaded_bytes"]
    );
}

#[test]
fn published_sizes_are_planned_without_a_checkpoint() {
    let plan = |more: &[&str]| {
        run(INSPECT, &[&["--size", "27b", "--device-profile", "rtx5090", "--json"], more].concat()).json()
    };
    let off = plan(&["--draft-tokens", "0", "--weights", "nvfp4"]);
    let memory = &device(&off, "rtx5090")["memory"];
    assert_eq!(
        (&memory["recurrent"], &memory["records"], &memory["mtp_weights"]),
        (&json!(150_994_944), &json!(0), &json!(0))
    );
    assert_eq!(off["parameters"]["text"], 26_895_998_464u64);
    assert_eq!((&device(&off, "rtx5090")["fits"], &device(&off, "rtx5090")["mtp"]), (&json!(true), &Value::Null));

    let on = plan(&["--weights", "nvfp4", "--context", "8192", "--lanes", "2", "--kv", "int8-g64"]);
    assert_eq!((&on["context"], &on["lanes"], &on["draft_tokens"]), (&json!(8192), &json!(2), &json!(3)));
    let with_drafts = &device(&on, "rtx5090")["memory"];
    assert!(with_drafts["records"].as_u64().unwrap() > 0 && with_drafts["mtp_weights"].as_u64().unwrap() > 0);
    assert_eq!(with_drafts["recurrent"], 2 * 150_994_944);

    // Two bytes a weight do not fit into 32 GiB, and NVFP4 that became FP8 needs about a byte.
    let stored = plan(&[]);
    assert_eq!(
        (&device(&stored, "rtx5090")["fits"], &device(&stored, "rtx5090")["largest_context"]),
        (&json!(false), &Value::Null)
    );
    let bridged = plan(&["--weights", "nvfp4,bridge-fp8"]);
    let fp8 = plan(&["--weights", "fp8"]);
    assert_eq!(device(&bridged, "rtx5090")["memory"], device(&fp8, "rtx5090")["memory"]);

    let text = run(INSPECT, &["--size", "Qwen3.6-35B-A3B"]);
    assert!(text.stdout.contains("256 experts of width 512, 8 a token"), "{}", text.stdout);
}

#[test]
fn devices_are_shown() {
    let text = run(INSPECT, &["--device", "--bandwidth", "--device-profile", "gb10"]);
    assert_eq!((text.status, text.stderr.as_str()), (0, ""));
    for words in ["CPU ", "threads", "CUDA ", "launch size", "GB10, capability 12.1, 48 SMs"] {
        assert!(text.stdout.contains(words), "{words}: {}", text.stdout);
    }
    let json = run(INSPECT, &["--device", "--json"]).json();
    assert_eq!((&json["cpu"]["kind"], &json["cpu"]["bandwidth"]), (&json!("cpu"), &Value::Null));
    assert!(json["cuda"].is_array() && json["tuning"].is_array());
    assert_eq!(json["cuda_answers"], json!([]));
    // Every GPU that there is answers, and without one there is a reason.
    let json = run(INSPECT, &["--device", "--kernels", "--json"]).json();
    let count = |what: &str| json[what].as_array().unwrap().len();
    assert_eq!(count("cuda"), count("cuda_answers"));
    assert_eq!(count("cuda") == 0, json["cuda_note"].is_string());
    run(INSPECT, &["--kernels"]).fails(2, &["--device"]);
}

#[test]
fn heads_that_never_decay_are_named() {
    let folder = folder();
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor("model.layers.4.linear_attn.A_log").unwrap();
    let at = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
    let mut changed = bytes.clone();
    // Head 2 of layer 4 becomes −∞ in BF16.
    changed[at + 4..at + 6].copy_from_slice(&0xFF80u16.to_le_bytes());
    std::fs::write(&weights, changed).unwrap();
    let dir = path(folder.path());
    let json = run(INSPECT, &[dir, "--json", "--device-profile", "gb10"]).json();
    assert_eq!(json["non_decaying_heads"], json!([{ "layer": 4, "heads": [2] }]));
    assert!(run(INSPECT, &[dir]).stdout.contains("layer 4: [2]"));
}

#[test]
fn wrong_questions_are_refused() {
    run(INSPECT, &["--size", "28b"]).fails(2, &["28b", "397b-a17b"]);
    run(INSPECT, &["--device-profile", "gtx1080"]).fails(2, &["gtx1080", "rtx5090"]);
    run(INSPECT, &["--kv", "fp4"]).fails(2, &["int8-g64"]);
    run(INSPECT, &["--size", "27b", "somewhere"]).fails(2, &["--size"]);
    run(INSPECT, &["--bandwidth"]).fails(2, &["--device"]);
    run(INSPECT, &["--context", "0"]).fails(2, &["--context"]);
    run(INSPECT, &["--lanes", "0"]).fails(2, &["--lanes"]);
    run(INSPECT, &["--draft-tokens", "99"]).fails(2, &["--draft-tokens"]);
    let folder = tempfile::tempdir().unwrap();
    run(INSPECT, &[path(folder.path())]).fails(1, &["config.json"]);
    let text = file(&folder, "file", "");
    run(INSPECT, &[&text]).fails(1, &["config.json"]);
}
