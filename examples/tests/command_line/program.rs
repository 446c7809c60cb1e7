//! Running a program and looking at what it did.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ninfer_examples::shipped;
use serde_json::Value;

/// All programs.
pub(crate) const PROGRAMS: [&str; 4] = [
    env!("CARGO_BIN_EXE_generate"),
    env!("CARGO_BIN_EXE_inspect"),
    env!("CARGO_BIN_EXE_perplexity"),
    env!("CARGO_BIN_EXE_quantize"),
];

/// What a run left behind.
pub(crate) struct Run {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Run {
    let Output { status, stdout, stderr } =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let run = Run { status: status.code().unwrap(), stdout: text(stdout), stderr: text(stderr) };
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    run
}

impl Run {
    /// The JSON object of a run that went well.
    pub(crate) fn json(&self) -> Value {
        assert_eq!((self.status, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        assert_eq!(self.stdout.lines().count(), 1, "one object on one line");
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Checks that a run failed with this status, a message with these words, and nothing on standard output.
    pub(crate) fn fails(&self, status: i32, words: &[&str]) {
        assert_eq!(self.status, status, "{}{}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        let lines: Vec<&str> = self.stderr.lines().collect();
        let [error, help] = lines[..] else { panic!("two lines expected: {}", self.stderr) };
        assert!(error.starts_with("error: ") && help.starts_with("help: "), "{}", self.stderr);
        assert!(help.len() > 12, "{help}");
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is missing: {}", self.stderr);
        }
    }
}

/// A copy of the shipped model's small files in a folder of its own, with its weights left out.
pub(crate) fn folder_without_weights() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    {
        // Written anew, because the originals may be read-only.
        std::fs::write(folder.path().join(name), std::fs::read(shipped_model().join(name)).unwrap()).unwrap();
    }
    folder
}

/// As [`folder_without_weights`], with the weights.
pub(crate) fn folder() -> tempfile::TempDir {
    let folder = folder_without_weights();
    let bytes = std::fs::read(shipped_model().join("model.safetensors")).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

pub(crate) fn shipped_model() -> PathBuf {
    shipped::model_or_shipped(None).unwrap()
}

pub(crate) fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Writes a file into a folder and gives its path.
pub(crate) fn file(folder: &tempfile::TempDir, name: &str, content: impl AsRef<[u8]>) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}
