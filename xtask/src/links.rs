//! Relative links of Markdown files.

use std::collections::BTreeMap;

use crate::markdown::{anchors, links};
use crate::report::Report;
use crate::tree;

pub fn check(report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    let files = tree::files(&root)?;
    let mut texts = BTreeMap::new();
    for file in files.iter().filter(|f| f.ends_with(".md")) {
        texts.insert(file.as_str(), tree::read(&root, file)?);
    }
    let mut count = 0;
    for (file, text) in &texts {
        for link in links(text) {
            let Some((path, anchor)) = resolve(file, &link.target) else { continue };
            count += 1;
            let exists = files.contains(&path) || files.iter().any(|f| is_inside(f, &path));
            let named = |a: &str| texts.get(path.as_str()).is_none_or(|t| anchors(t).iter().any(|n| n == a));
            if !exists {
                report.fail(format!("{file}:{}: {} does not exist", link.line, link.target));
            } else if !anchor.is_none_or(named) {
                report.fail(format!("{file}:{}: {} names no heading", link.line, link.target));
            }
        }
    }
    report.checked(format!("{count} relative links in {} Markdown files", texts.len()));
    Ok(())
}

fn is_inside(file: &str, folder: &str) -> bool {
    folder.is_empty() || file.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
}

/// Path from the root and heading of a relative link; `None` for an address or an item of the documentation.
fn resolve<'t>(file: &str, target: &'t str) -> Option<(String, Option<&'t str>)> {
    if target.contains("://") || target.contains("::") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
    if path.is_empty() {
        return Some((file.to_owned(), anchor));
    }
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            // Above the root there is nothing that belongs to the project.
            ".." if parts.last().is_none_or(|p| *p == "..") => parts.push(".."),
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    Some((parts.join("/"), anchor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_relative_to_their_file() {
        let path = |file, target| resolve(file, target).map(|(path, _)| path);
        assert_eq!(path("docs/a.md", "b.md").as_deref(), Some("docs/b.md"));
        assert_eq!(path("docs/a.md", "../README.md").as_deref(), Some("README.md"));
        assert_eq!(path("docs/a.md", "./x/../b.md#c").as_deref(), Some("docs/b.md"));
        assert_eq!(path("README.md", "docs/").as_deref(), Some("docs"));
        assert_eq!(path("README.md", "../x").as_deref(), Some("../x"));
        assert_eq!(resolve("a.md", "#c"), Some(("a.md".to_owned(), Some("c"))));
    }

    #[test]
    fn addresses_and_items_are_left_alone() {
        for target in ["https://example.org/x", "mailto:a@example.org", "ninfer_core::Backend"] {
            assert_eq!(resolve("a.md", target), None);
        }
    }

    #[test]
    fn folders_are_links_too() {
        assert!(is_inside("docs/a.md", "docs") && is_inside("a", "") && !is_inside("docs2/a.md", "docs"));
    }
}
