//! The table of all modules that the crate is compiled with, as Rust.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::manifest::{FOLDER, Manifest, file_name};
use super::target::Target;
use crate::process::run;

/// The file, inside the crate.
pub const FILE: &str = "src/cuda/images.rs";

const HEAD: &str = "//! All compiled kernels, by family, least specific target first. Written by `cargo xtask ptx`.

use ninfer_core::capability::{PtxIsa, Target};

use super::kernels::Image;

pub(super) const IMAGES: &[Image] = &[
";

/// The text of the file, as rustfmt leaves it.
pub fn text(root: &Path, manifest: &Manifest) -> Result<String, String> {
    let mut out = String::from(HEAD);
    for family in &manifest.families {
        for module in &family.modules {
            let target = Target::named(&module.target).ok_or_else(|| format!("no target {}", module.target))?;
            let file = file_name(&family.name, &module.target);
            let names: Vec<_> = module.entries.iter().map(|e| format!("\"{}\"", e.name)).collect();
            let (major, minor) = target.version;
            let row = format!(
                "Image {{ family: \"{}\", target: Target::{}, isa: PtxIsa::new({major}, {minor}), \
                 bytes: include_bytes!(\"../../{FOLDER}/{file}\"), entries: &[{}] }},\n",
                family.name,
                target.variant,
                names.join(", ")
            );
            out.write_str(&row).map_err(|e| e.to_string())?;
        }
    }
    out.push_str("];\n");
    format(root, &out)
}

/// Formats a source as `cargo fmt` does.
fn format(root: &Path, source: &str) -> Result<String, String> {
    let io = |e: std::io::Error| format!("{FILE}: {e}");
    let folder = tempfile::tempdir().map_err(io)?;
    let file = folder.path().join("images.rs");
    std::fs::write(&file, source).map_err(io)?;
    run(Command::new("rustfmt").args(["--edition", "2024", "--config-path"]).arg(root).arg(&file))?;
    std::fs::read_to_string(&file).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::manifest::{Family, Kernel, Module};
    use crate::tree;

    #[test]
    fn each_module_is_a_row() {
        let names: Vec<String> = (0..40).map(|i| format!("linear_projection_{i}")).collect();
        let kernel = |name: &String| Kernel {
            name: name.clone(),
            parameters: vec![],
            shared: 0,
            registers: Default::default(),
            local: Default::default(),
        };
        let module = |target: &str| Module {
            target: target.into(),
            version: "0.0".into(),
            compressed: 1,
            bytes: 1234,
            sha256: String::new(),
            entries: names.iter().map(kernel).collect(),
        };
        let modules = vec![module("sm_80"), module("sm_120f")];
        let families = vec![Family { name: "linear".into(), sources: vec![], modules }];
        let text = text(&tree::root(), &Manifest { families, ..Manifest::default() }).unwrap();
        assert!(text.contains("target: Target::Sm120f,\n        isa: PtxIsa::new(8, 8),\n"), "{text}");
        assert!(text.contains("include_bytes!(\"../../ptx/linear.sm_80.ptx.z\"),\n"), "{text}");
        assert!(names.iter().all(|n| text.matches(&format!("\"{n}\"")).count() == 2));
        assert!(text.lines().all(|l| l.len() <= 120));
    }
}
