//! What `cargo package` puts into each published crate.

use crate::report::Report;
use crate::{cargo, tree};

/// Largest package, in bytes before compression.
const BUDGET: u64 = 2 << 20;
/// Larger budgets: the kernels come with compiled code for every target.
const LARGER: [(&str, u64); 1] = [("ninfer-kernels", 5_000_000)];
/// Names of folders that stay at home.
const EXCLUDED: [&str; 5] = ["tests", "fixtures", "benches", "target", "models"];
/// Fewest lines of a README that says something.
const README_LINES: usize = 5;
/// What a manifest must say.
const MANIFEST: [&str; 5] = ["description", "license", "readme", "rust_version", "edition"];

pub fn check(report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    let files = tree::files(&root)?;
    for member in cargo::members(&root)?.iter().filter(|m| m.is_published) {
        let name = &member.name;
        for key in MANIFEST.into_iter().filter(|key| !member.manifest[*key].is_string()) {
            report.fail(format!("{name}: the manifest has no {}", key.replace('_', "-")));
        }
        for key in ["keywords", "categories"] {
            if !(1..=5).contains(&cargo::array(&member.manifest[key]).len()) {
                report.fail(format!("{name}: the manifest needs 1 to 5 {key}"));
            }
        }
        let list = cargo::stdout(&root, &["package", "--list", "--allow-dirty", "--package", name])?;
        let list: Vec<&str> = list.lines().collect();
        for problem in problems(&list, &files, &member.folder) {
            report.fail(format!("{name}: {problem}"));
        }
        let readme = tree::read(&root, &format!("{}/README.md", member.folder)).unwrap_or_default();
        if readme.lines().count() < README_LINES {
            report.fail(format!("{name}: README.md says nothing yet"));
        }
        // What cargo generates has no file here.
        let folder = root.join(&member.folder);
        let bytes = list.iter().filter_map(|f| std::fs::metadata(folder.join(f)).ok()).map(|m| m.len()).sum::<u64>();
        let budget = LARGER.iter().find(|(n, _)| n == name).map_or(BUDGET, |(_, b)| *b);
        report.checked(format!("{name}: {} files, {} KiB of at most {} KiB", list.len(), bytes >> 10, budget >> 10));
        if bytes > budget {
            report.fail(format!(
                "{name}: the package has {} KiB, at most {} KiB are wanted",
                bytes >> 10,
                budget >> 10
            ));
        }
    }
    Ok(())
}

/// What a package lacks, and what it should not have.
fn problems(list: &[&str], files: &[String], folder: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for needed in ["Cargo.toml", "README.md", "src/lib.rs"] {
        if !list.contains(&needed) {
            problems.push(format!("the package lacks {needed}"));
        }
    }
    let source = format!("{folder}/");
    let sources = files.iter().filter_map(|f| f.strip_prefix(&source)).filter(|f| f.starts_with("src/"));
    problems.extend(sources.filter(|f| !list.contains(f)).map(|f| format!("the package lacks {f}")));
    let folders = |f: &str| f.split('/').rev().skip(1).any(|part| EXCLUDED.contains(&part));
    let unwanted = |f: &str| f.ends_with(".safetensors") || (folders(f) && !f.starts_with("src/"));
    problems.extend(list.iter().filter(|f| unwanted(f)).map(|f| format!("the package should not have {f}")));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_complete_package_has_no_problems() {
        let files = ["a/src/lib.rs", "a/src/tests/x.rs", "a/tests/t.rs", "b/src/lib.rs"].map(str::to_owned);
        let list = ["Cargo.toml", "README.md", "src/lib.rs", "src/tests/x.rs"];
        assert!(problems(&list, &files, "a").is_empty());
    }

    #[test]
    fn missing_and_unwanted_files_are_named() {
        let files = ["a/src/lib.rs", "a/src/x.rs"].map(str::to_owned);
        let list = ["Cargo.toml", "src/lib.rs", "tests/fixtures/y.json", "src/z.safetensors"];
        let expected = [
            "the package lacks README.md",
            "the package lacks src/x.rs",
            "the package should not have tests/fixtures/y.json",
            "the package should not have src/z.safetensors",
        ];
        assert_eq!(problems(&list, &files, "a"), expected);
    }
}
