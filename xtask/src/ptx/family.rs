//! The source of a family of kernels: its file, the headers it includes, and what its first lines say.
//!
//! A family is `kernels/<family>.cu`. Among the comments at its top it names its targets, and the entries that may use
//! local memory if there are any, each with the reason behind a colon:
//!
//! ```text
//! // targets: sm_80 sm_90a
//! // local memory: attention_merge: indexes an array by a run-time value, once per block
//! ```

use std::collections::BTreeSet;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::target::Target;
use crate::tree;

/// Folder of the crate with the kernels, relative to the root.
pub const CRATE: &str = "ninfer-kernels";
/// Folder of the sources, inside the crate.
pub const FOLDER: &str = "kernels";

/// A file that a family is made of.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub struct Source {
    /// Path inside the crate.
    pub file: String,
    /// Hash of its bytes, in hexadecimal.
    pub sha256: String,
}

/// The source of a family.
#[derive(Debug)]
pub struct Family {
    pub name: String,
    /// The text of its main file.
    pub text: String,
    pub targets: Vec<&'static Target>,
    /// Entries that may have a stack frame or spill registers.
    pub local_memory: BTreeSet<String>,
    /// The main file, then all headers in the order of their names.
    pub sources: Vec<Source>,
}

/// Names of all families, in order.
pub fn names(root: &Path) -> Result<Vec<String>, String> {
    let folder = root.join(CRATE).join(FOLDER);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).into_iter().flatten() {
        let entry = entry.map_err(|e| format!("{}: {e}", folder.display()))?;
        names.extend(entry.file_name().to_str().and_then(|n| n.strip_suffix(".cu")).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

impl Family {
    /// Reads a family and all that it includes.
    pub fn read(root: &Path, name: &str) -> Result<Self, String> {
        let crate_folder = root.join(CRATE);
        let file = format!("{FOLDER}/{name}.cu");
        let text = tree::read(&crate_folder, &file)?;
        let mut seen = BTreeSet::new();
        let mut open = vec![file.clone()];
        while let Some(next) = open.pop() {
            if !seen.insert(next.clone()) {
                continue;
            }
            for (line, include) in includes(&tree::read(&crate_folder, &next)?) {
                let beside = next.rsplit_once('/').map_or(FOLDER, |(folder, _)| folder);
                let found = [beside, FOLDER].map(|f| format!("{f}/{include}"));
                let found = found.into_iter().find(|f| crate_folder.join(f).is_file());
                open.push(found.ok_or_else(|| format!("{CRATE}/{next}:{line}: {include} is not in {CRATE}/{FOLDER}"))?);
            }
        }
        seen.remove(&file);
        let files = std::iter::once(file.clone()).chain(seen);
        let hashed = |file: String| {
            let bytes = std::fs::read(crate_folder.join(&file)).map_err(|e| format!("{file}: {e}"))?;
            Ok(Source { file, sha256: sha256(&bytes) })
        };
        let sources = files.map(hashed).collect::<Result<_, String>>()?;
        let (targets, local_memory) = head(&text).map_err(|e| format!("{CRATE}/{file}: {e}"))?;
        Ok(Self { name: name.to_owned(), text, targets, local_memory, sources })
    }

    /// Path of the main file, relative to the root.
    pub fn path(&self) -> String {
        format!("{CRATE}/{FOLDER}/{}.cu", self.name)
    }
}

/// The hash of some bytes, in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Line numbers and names of the headers in quotes; those in angle brackets come with the compiler.
fn includes(text: &str) -> Vec<(usize, String)> {
    let include = |line: &str| {
        let name = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim_start();
        Some(name.strip_prefix('"')?.split_once('"')?.0.to_owned())
    };
    text.lines().enumerate().filter_map(|(i, line)| include(line).map(|name| (i + 1, name))).collect()
}

/// What the comments at the top say.
fn head(text: &str) -> Result<(Vec<&'static Target>, BTreeSet<String>), String> {
    let mut targets = Vec::new();
    let mut local_memory = BTreeSet::new();
    for line in text.lines().map_while(|l| l.strip_prefix("//")).map(str::trim) {
        if let Some(list) = line.strip_prefix("targets:") {
            for name in list.split_whitespace() {
                targets.push(Target::named(name).ok_or_else(|| format!("no target is called {name}"))?);
            }
        } else if let Some(list) = line.strip_prefix("local memory:") {
            let (names, _) = list
                .split_once(':')
                .filter(|(_, why)| !why.trim().is_empty())
                .ok_or("`local memory:` needs entries, a colon and the reason")?;
            local_memory.extend(names.split_whitespace().map(str::to_owned));
        }
    }
    let order = |t: &Target| super::target::ALL.iter().position(|a| a == t);
    targets.sort_by_key(|t| order(t));
    targets.dedup();
    if targets.is_empty() {
        return Err("the comments at its top need a line such as `// targets: sm_80 sm_90a`".to_owned());
    }
    Ok((targets, local_memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_names_targets_and_exceptions() {
        let text =
            "// What it does.\n// targets: sm_90a sm_80 sm_90a\n// local memory: a b: why\n\n// targets: sm_89\n";
        let (targets, local) = head(text).unwrap();
        assert_eq!(targets.iter().map(|t| t.name).collect::<Vec<_>>(), ["sm_80", "sm_90a"]);
        assert_eq!(local, ["a", "b"].map(str::to_owned).into());
        assert!(head("// x\n").unwrap_err().contains("targets:"));
        assert!(head("// targets: sm_75\n").unwrap_err().contains("sm_75"));
        assert!(head("// targets: sm_80\n// local memory: a\n").unwrap_err().contains("reason"));
    }

    #[test]
    fn headers_are_followed_from_beside_and_from_the_top() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = root.path().join(CRATE).join(FOLDER).join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        write("a.cu", "// targets: sm_80\n#include \"common/x.cuh\"\n#include <cuda_bf16.h>\n");
        write("common/x.cuh", "  #  include \"y.cuh\"\n#include \"ptx/z.cuh\"\n");
        write("common/y.cuh", "#include \"common/x.cuh\"\n");
        write("ptx/z.cuh", "abc");
        assert_eq!(names(root.path()).unwrap(), ["a"]);
        let family = Family::read(root.path(), "a").unwrap();
        let files: Vec<_> = family.sources.iter().map(|s| s.file.as_str()).collect();
        assert_eq!(files, ["kernels/a.cu", "kernels/common/x.cuh", "kernels/common/y.cuh", "kernels/ptx/z.cuh"]);
        assert_eq!(family.sources[3].sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");

        write("ptx/z.cuh", "#include \"gone.cuh\"");
        let error = Family::read(root.path(), "a").unwrap_err();
        assert!(error.contains("kernels/ptx/z.cuh:1: gone.cuh"), "{error}");
        assert!(names(&root.path().join("nowhere")).unwrap().is_empty());
    }
}
