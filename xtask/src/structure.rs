//! Whether docs/structure.md has a line for every module.
//!
//! A crate is a heading `## name`, and each module a list item below it: the path inside `src` in backquotes, a colon,
//! and what the module is. Files named `tests.rs` are left out.

use std::collections::BTreeSet;

/// The document.
pub const FILE: &str = "docs/structure.md";

/// Modules of the crate in `folder`, as paths inside its `src`.
pub fn modules<'f>(files: &'f [String], folder: &str) -> BTreeSet<&'f str> {
    let source = format!("{folder}/src/");
    let inside = files.iter().filter_map(|f| f.strip_prefix(&source));
    inside.filter(|f| f.ends_with(".rs") && *f != "tests.rs" && !f.ends_with("/tests.rs")).collect()
}

/// What is missing in the text, and what it has too much.
pub fn compare(text: &str, name: &str, modules: &BTreeSet<&str>) -> Vec<String> {
    let mut failures = Vec::new();
    let mut listed = BTreeSet::new();
    let lines = text.lines().skip_while(|l| l.strip_prefix("## ") != Some(name)).skip(1);
    for line in lines.take_while(|l| !l.starts_with("## ")) {
        let Some((module, rest)) = line.strip_prefix("- `").and_then(|l| l.split_once('`')) else { continue };
        if rest.strip_prefix(": ").is_none_or(|what| what.trim().is_empty()) {
            failures.push(format!("{FILE}: `{module}` of {name} needs a colon and a line on what it is"));
        }
        if !modules.contains(module) {
            failures.push(format!("{FILE}: {name} has no module {module}"));
        }
        if !listed.insert(module) {
            failures.push(format!("{FILE}: module {module} of {name} stands there twice"));
        }
    }
    failures.extend(modules.difference(&listed).map(|m| format!("{FILE}: module {m} of {name} is missing")));
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Structure\n## a\n- `lib.rs`: the crate\n- `x/y.rs`: a part\n\n## b\n- `lib.rs`: another\n";

    #[test]
    fn modules_are_the_sources_of_a_crate() {
        let files = ["a/src/lib.rs", "a/src/x/tests.rs", "a/src/x/y.rs", "a/tests/t.rs", "a/src/x.md", "ab/src/z.rs"];
        let files = files.map(str::to_owned);
        assert_eq!(modules(&files, "a"), BTreeSet::from(["lib.rs", "x/y.rs"]));
    }

    #[test]
    fn the_same_modules_give_no_failure() {
        assert!(compare(TEXT, "a", &BTreeSet::from(["lib.rs", "x/y.rs"])).is_empty());
    }

    #[test]
    fn each_difference_is_one() {
        let of = |modules: &[&str], name: &str| compare(TEXT, name, &modules.iter().copied().collect());
        assert!(of(&["lib.rs", "x/y.rs", "z.rs"], "a")[0].contains("z.rs of a is missing"));
        assert!(of(&["lib.rs"], "a")[0].contains("has no module x/y.rs"));
        assert_eq!(of(&["lib.rs"], "b"), Vec::<String>::new());
        assert_eq!(of(&["lib.rs"], "c").len(), 1, "a crate without a heading");
        let twice = TEXT.replace("x/y.rs", "lib.rs");
        assert!(compare(&twice, "a", &BTreeSet::from(["lib.rs"]))[0].contains("twice"));
        let bare = TEXT.replace(": the crate", "");
        assert!(compare(&bare, "a", &BTreeSet::from(["lib.rs", "x/y.rs"]))[0].contains("colon"));
    }
}
