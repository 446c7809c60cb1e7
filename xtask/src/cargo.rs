//! Runs cargo and reads what it says about the workspace.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A crate of the workspace.
pub struct Member {
    pub name: String,
    /// Folder, relative to the root.
    pub folder: String,
    /// Feature names and what they switch on.
    pub features: Vec<(String, Vec<String>)>,
    /// Whether it may be published.
    pub is_published: bool,
    /// The manifest as cargo understood it.
    pub manifest: Value,
}

/// Runs cargo in the workspace.
pub fn run(root: &Path, args: &[&str]) -> Result<Output, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    Command::new(&cargo).args(args).current_dir(root).output().map_err(|e| format!("{}: {e}", cargo.display()))
}

/// Runs cargo, which must succeed, for its standard output.
pub fn stdout(root: &Path, args: &[&str]) -> Result<String, String> {
    let output = run(root, args)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cargo {}: {}", args.join(" "), text.trim()));
    }
    String::from_utf8(output.stdout).map_err(|e| format!("cargo {}: {e}", args.join(" ")))
}

/// The answer of `cargo metadata`.
pub fn metadata(root: &Path, more: &[&str]) -> Result<Value, String> {
    let text = stdout(root, &[&["metadata", "--format-version", "1", "--locked"], more].concat())?;
    serde_json::from_str(&text).map_err(|e| format!("cargo metadata: {e}"))
}

/// The crates of the workspace, in the order of their names.
pub fn members(root: &Path) -> Result<Vec<Member>, String> {
    let metadata = metadata(root, &["--no-deps"])?;
    let mut members: Vec<_> = array(&metadata["packages"]).iter().map(|p| member(root, p)).collect();
    members.sort_by(|a, b| a.name.cmp(&b.name));
    if members.is_empty() { Err("the workspace has no crates".to_owned()) } else { Ok(members) }
}

fn member(root: &Path, package: &Value) -> Member {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let folder = manifest.parent().and_then(|f| f.strip_prefix(root).ok()).unwrap_or(Path::new(""));
    let features = package["features"].as_object().into_iter().flatten();
    Member {
        name: text(&package["name"]),
        folder: folder.display().to_string(),
        features: features.map(|(name, on)| (name.clone(), array(on).iter().map(text).collect())).collect(),
        // Null allows every registry, an empty list none.
        is_published: package["publish"].is_null() || !array(&package["publish"]).is_empty(),
        manifest: package.clone(),
    }
}

/// The elements of a JSON array; none of anything else.
pub fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A JSON string; empty for anything else.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
