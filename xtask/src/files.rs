//! Length of source files, leftover markers, size of the tree, and whether docs/structure.md names every module.

use crate::report::Report;
use crate::{cargo, structure, tree};

/// Longest source file, in lines.
const MAX_LINES: usize = 700;
/// Largest tree, in bytes: the demo model is most of it.
const MAX_TREE: u64 = 40 << 20;

/// Macros that are for unfinished code. Each marker is written in two pieces, so that this file has none.
const MACROS: [&str; 3] = [concat!("to", "do!"), concat!("unimpl", "emented!"), concat!("db", "g!")];
/// Words that mark unfinished code.
const WORDS: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
/// A test or an example that does not run.
const IGNORED: [&str; 3] = [concat!("#[ign", "ore"), concat!("```ign", "ore"), concat!("rust,ign", "ore")];

pub fn check(report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    let files = tree::files(&root)?;

    let mut bytes = 0;
    for file in &files {
        bytes += std::fs::metadata(root.join(file)).map_err(|e| format!("{file}: {e}"))?.len();
    }
    report.checked(format!("{} files, {:.1} MiB of at most {} MiB", files.len(), mib(bytes), MAX_TREE >> 20));
    if bytes > MAX_TREE {
        report.fail(format!("the tree has {:.1} MiB, at most {} MiB are wanted", mib(bytes), MAX_TREE >> 20));
    }

    let mut longest = (0, "");
    let sources = || files.iter().filter(|f| has_extension(f, &["rs", "cu", "cuh"]));
    for file in sources() {
        let text = tree::read(&root, file)?;
        let lines = text.lines().count();
        longest = longest.max((lines, file));
        if lines > MAX_LINES {
            report.fail(format!("{file} has {lines} lines, at most {MAX_LINES} are wanted"));
        }
        for (i, line) in text.lines().enumerate() {
            if let Some(marker) = leftover(line) {
                report.fail(format!("{file}:{}: {marker}", i + 1));
            }
        }
    }
    let (lines, file) = longest;
    report.checked(format!("{} source files, the longest is {file} with {lines} lines", sources().count()));

    let text = tree::read(&root, structure::FILE)?;
    for member in &cargo::members(&root)? {
        let modules = structure::modules(&files, &member.folder);
        report.checked(format!("{}: {} modules of {}", structure::FILE, modules.len(), member.name));
        for difference in structure::compare(&text, &member.name, &modules) {
            report.fail(difference);
        }
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn has_extension(file: &str, extensions: &[&str]) -> bool {
    file.rsplit_once('.').is_some_and(|(_, e)| extensions.contains(&e))
}

/// The first marker in a line.
fn leftover(line: &str) -> Option<&'static str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let stands = |marker: &str, ends: bool| {
        line.match_indices(marker).any(|(at, _)| {
            let after = line[at + marker.len()..].chars().next();
            !line[..at].ends_with(is_word) && (!ends || !after.is_some_and(is_word))
        })
    };
    let word = concat!("ign", "ore");
    let macros = MACROS.into_iter().filter(|m| stands(m, false));
    let words = WORDS.into_iter().filter(|w| stands(w, true));
    let ignored = IGNORED.into_iter().filter(|i| line.contains(i));
    let conditional = (line.contains("cfg_attr(") && stands(word, true)).then_some(word);
    macros.chain(words).chain(ignored).chain(conditional).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found() {
        for marker in MACROS.into_iter().chain(WORDS).chain(IGNORED) {
            for line in [format!("    {marker}"), format!("// {marker} later"), format!("x({marker}(y))")] {
                assert!(leftover(&line).is_some(), "{line}");
            }
        }
        assert!(leftover(concat!("#[cfg_attr(miri, ign", "ore)]")).is_some());
    }

    #[test]
    fn other_text_is_not() {
        for line in [
            "let ignore_stop = true;",
            "mastodo!()",
            "a TODOS b",
            "fn with_ignore_stop(ignore: bool)",
            "/// Errors are not ignored.",
            "```rust,no_run",
            "#[cfg_attr(docsrs, doc(cfg(feature = \"cuda\")))]",
        ] {
            assert_eq!(leftover(line), None, "{line}");
        }
    }
}
