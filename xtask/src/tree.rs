//! The files of the project.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the workspace.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Paths of all files below the root, sorted: those git tracks, or where git cannot tell, those that are no build output.
pub fn files(root: &Path) -> Result<Vec<String>, String> {
    let mut files = match tracked(root) {
        Some(files) => files,
        None => {
            let mut files = Vec::new();
            walk(root, "", &mut files)?;
            files
        }
    };
    // A tracked file that was just deleted is no file.
    files.retain(|f| root.join(f).is_file());
    files.sort();
    Ok(files)
}

fn tracked(root: &Path) -> Option<Vec<String>> {
    let output = Command::new("git").args(["ls-files", "-z", "--cached"]).current_dir(root).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let files: Vec<_> = text.split('\0').filter(|f| !f.is_empty()).map(str::to_owned).collect();
    (output.status.success() && !files.is_empty()).then_some(files)
}

fn walk(dir: &Path, prefix: &str, out: &mut Vec<String>) -> Result<(), String> {
    // Cargo marks its output folders with this file.
    if dir.join("CACHEDIR.TAG").is_file() {
        return Ok(());
    }
    for entry in fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))? {
        let entry = entry.map_err(|e| format!("{}: {e}", dir.display()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type().map_err(|e| format!("{}: {e}", entry.path().display()))?;
        if kind.is_dir() && name != ".git" {
            walk(&entry.path(), &format!("{prefix}{name}/"), out)?;
        } else if kind.is_file() {
            out.push(format!("{prefix}{name}"));
        }
    }
    Ok(())
}

/// Reads a file as text.
pub fn read(root: &Path, file: &str) -> Result<String, String> {
    fs::read_to_string(root.join(file)).map_err(|e| format!("{file}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_file_is_found_with_and_without_git() {
        let root = root();
        let mut walked = Vec::new();
        walk(&root, "", &mut walked).unwrap();
        for files in [files(&root).unwrap(), walked] {
            assert!(files.iter().any(|f| f == "xtask/Cargo.toml"), "{files:?}");
            assert!(!files.iter().any(|f| f.starts_with(".git/") || f.contains("/debug/deps/")));
        }
    }
}
