//! Broken command lines, files and folders: a message, a status, never a panic.

use crate::program::{PROGRAMS, file, folder, folder_without_weights, path, run, shipped_model};

const GENERATE: &str = env!("CARGO_BIN_EXE_generate");

#[test]
fn help_has_examples_and_fits_every_program() {
    for program in PROGRAMS {
        let help = run(program, &["--help"]);
        assert_eq!((help.status, help.stderr.as_str()), (0, ""));
        for words in ["Examples:", "Usage:", "--json", "--weights", "Exit status"] {
            assert!(help.stdout.contains(words), "{program} {words}: {}", help.stdout);
        }
        assert_eq!(run(program, &["--version"]).status, 0);
    }
    let help = run(GENERATE, &["--help"]).stdout;
    for option in [
        "--model",
        "--prompt",
        "--messages",
        "--raw",
        "--max-new",
        "--max-context",
        "--greedy",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--presence-penalty",
        "--frequency-penalty",
        "--repetition-penalty",
        "--seed",
        "--stop",
        "--spec",
        "--draft-tokens",
        "--thinking",
        "--system",
        "--prefill-chunk",
        "--device",
        "--threads",
        "--weights",
        "--kv-dtype",
        "--print-token-ids",
        "--ignore-eos",
        "--json",
    ] {
        assert!(help.contains(option), "{option}");
    }
}

#[test]
fn illegal_command_lines_end_with_status_two() {
    for program in PROGRAMS {
        run(program, &["--no-such-option"]).fails(2, &["--no-such-option", "--help"]);
        run(program, &["--weights", "q9"]).fails(2, &["q9", "bridge-fp8"]);
    }
    for (arguments, words) in [
        (&["--jsson"][..], &["--json"][..]),
        (&["--prompt", "a", "--raw", "b"], &["--raw"]),
        (&["--system", "a", "--raw", "b"], &["--raw"]),
        (&["--prompt", ""], &["prompt is empty"]),
        (&["--raw", ""], &["prompt is empty"]),
        (&["--max-new", "0"], &["--max-new"]),
        (&["--max-new", "-1"], &["-1"]),
        (&["--temperature", "-1"], &["temperature"]),
        (&["--temperature", "NaN"], &["temperature"]),
        (&["--top-p", "0"], &["top_p"]),
        (&["--draft-tokens", "6"], &["1 to 5"]),
        (&["--spec", "ngram", "--draft-tokens", "16"], &["1 to 15"]),
        (&["--spec", "off", "--draft-tokens", "1"], &["--spec off"]),
        (&["--draft-tokens", "0"], &["--spec off"]),
        (&["--spec", "eagle"], &["mtp", "ngram"]),
        (&["--thinking", "maybe"], &["maybe"]),
        (&["--stop", ""], &["stop string"]),
        (&["--device", "tpu"], &["cuda:N"]),
        (&["--threads", "0"], &["--threads"]),
        (&["--threads", "1000000"], &["1000000", "at once"]),
        (&["--kv-dtype", "f64"], &["int8 or fp8"]),
        (&["--max-context", "8193"], &["8193", "8192"]),
        (&["--max-context", "1"], &["--max-context"]),
        (&["--prefill-chunk", "0"], &["--prefill-chunk"]),
        (&["--prefill-chunk", "1000000000"], &["--prefill-chunk"]),
    ] {
        run(GENERATE, arguments).fails(2, words);
    }
}

#[test]
fn a_gpu_is_refused_with_a_reason() {
    // With a CUDA backend, a number that no machine has.
    let devices = if cfg!(feature = "cuda") { &["cuda:4294967295"][..] } else { &["cuda", "cuda:1"] };
    for device in devices {
        let refused = run(GENERATE, &["--device", device]);
        refused.fails(1, &[]);
        let reason = refused.stderr.lines().next().unwrap();
        assert!(reason.contains("CUDA") || reason.contains("NVIDIA driver"), "{reason}");
    }
}

#[test]
fn prompts_that_do_not_fit_are_refused() {
    run(GENERATE, &["--max-context", "25"]).fails(1, &["26 tokens of context", "limit is 25", "maximum context"]);
    let long = "a b c d ".repeat(3000);
    run(GENERATE, &["--raw", &long]).fails(1, &["tokens of context", "limit is 8192"]);
}

#[test]
fn messages_must_be_messages() {
    let folder = tempfile::tempdir().unwrap();
    for (content, words) in [
        ("[", &["not valid JSON"][..]),
        ("{}", &["messages"]),
        ("[]", &["no message"]),
        ("[1]", &["message 0"]),
        (r#"[{"content": "x"}]"#, &["message 0", "role"]),
        (r#"[{"role": "user", "content": {"a": 1}}]"#, &["message 0", "content"]),
    ] {
        let file = file(&folder, "chat.json", content);
        let refused = run(GENERATE, &["--messages", &file]);
        refused.fails(if content == "[]" { 2 } else { 1 }, words);
    }
    run(GENERATE, &["--messages", "/no/such/file.json"]).fails(1, &["/no/such/file.json"]);
}

#[test]
fn folders_that_hold_no_model_are_refused() {
    for program in [GENERATE, env!("CARGO_BIN_EXE_perplexity")] {
        run(program, &["--model", "/no/such/folder"]).fails(1, &["/no/such/folder"]);
    }
    let folder = folder_without_weights();
    let dir = path(folder.path());
    run(GENERATE, &["--model", dir]).fails(1, &["model.safetensors"]);

    file(&folder, "config.json", "{");
    run(GENERATE, &["--model", dir]).fails(1, &["config.json", "not valid JSON"]);
    file(&folder, "config.json", r#"{"model_type": "llama"}"#);
    run(GENERATE, &["--model", dir]).fails(1, &["llama", "qwen3_5"]);
}

#[test]
fn damaged_weights_are_refused() {
    let folder = folder();
    let dir = path(folder.path()).to_owned();
    let bytes = std::fs::read(shipped_model().join("model.safetensors")).unwrap();
    for length in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        file(&folder, "model.safetensors", &bytes[..length]);
        for program in PROGRAMS {
            let out = format!("{dir}/out");
            let arguments: &[&str] = match program {
                _ if program.ends_with("inspect") => &[&dir],
                _ if program.ends_with("quantize") => &["--model", &dir, "--weights", "q4", "--output", &out],
                _ => &["--model", &dir],
            };
            run(program, arguments).fails(1, &["model.safetensors"]);
        }
    }
    // A placeholder of large-file storage.
    file(&folder, "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n");
    run(GENERATE, &["--model", &dir]).fails(1, &["model.safetensors", "placeholder"]);
    file(&folder, "model.safetensors", &bytes);
    file(&folder, "tokenizer.json", "{\"model\": {}}");
    run(GENERATE, &["--model", &dir]).fails(1, &["tokenizer"]);
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    run(GENERATE, &["--model", &dir]).fails(1, &["tokenizer.json"]);
}

#[test]
fn a_checkpoint_without_a_template_still_continues_text() {
    let folder = folder();
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let dir = path(folder.path());
    run(GENERATE, &["--model", dir]).fails(1, &["no chat template", "raw prompt"]);
    assert_eq!(
        run(GENERATE, &["--model", dir, "--raw", "fn", "--max-new", "2", "--json"]).json()["finish_reason"],
        "length"
    );
}

/// A pipe without a writer would be waited for, and an endless file read until memory is gone.
#[test]
#[cfg(unix)]
fn special_files_are_refused_at_once() {
    let folder = folder_without_weights();
    let weights = folder.path().join("model.safetensors");
    let made = std::process::Command::new("mkfifo").arg(&weights).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo is part of every unix");
    run(GENERATE, &["--model", path(folder.path())]).fails(1, &["model.safetensors", "not a plain file"]);
    run(GENERATE, &["--messages", "/dev/zero"]).fails(1, &["/dev/zero", "limit"]);
}

/// What a file calls its tensors must not reach a terminal as it stands.
#[test]
fn names_of_tensors_are_escaped() {
    let folder = folder();
    let name = "x\u{1b}[31m";
    let header =
        format!(r#"{{"{}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#, name.replace('\u{1b}', "\\u001b"));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&[0; 4]);
    file(&folder, "model.safetensors", bytes);
    let refused = run(GENERATE, &["--model", path(folder.path())]);
    refused.fails(1, &[]);
    assert!(!refused.stderr.contains('\u{1b}'), "{}", refused.stderr);
}
