//! Builds each crate by itself with every choice of features that a user may make.
//!
//! Inside the workspace features are united over all crates, which hides a crate that forgot one of its own.

use std::collections::BTreeSet;

use crate::report::Report;
use crate::{cargo, tree};

pub fn check(report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    for member in cargo::members(&root)? {
        for features in choices(&member.features) {
            let list = features.join(",");
            let mut args = vec!["check", "--locked", "--package", &member.name, "--no-default-features"];
            if !features.is_empty() {
                args.extend(["--features", &list]);
            }
            let shown = if features.is_empty() { "no features" } else { &list };
            report.checked(format!("{} with {shown}", member.name));
            let output = cargo::run(&root, &args)?;
            let text = String::from_utf8_lossy(&output.stderr);
            // Cargo repeats the warnings of crates that it does not build again, but only of those in the workspace.
            if !output.status.success() {
                report.fail(format!("{} with {shown} does not build:\n{}", member.name, text.trim()));
            } else if text.lines().any(|line| line.starts_with("warning")) {
                report.fail(format!("{} with {shown} builds with warnings:\n{}", member.name, text.trim()));
            }
        }
    }
    Ok(())
}

/// No feature, each one alone, and all; choices that switch on the same features count once.
fn choices(features: &[(String, Vec<String>)]) -> Vec<Vec<String>> {
    let names: Vec<&str> = features.iter().map(|(name, _)| name.as_str()).filter(|&n| n != "default").collect();
    let alone = names.iter().map(|&n| vec![n]);
    let mut seen = BTreeSet::new();
    std::iter::once(Vec::new())
        .chain(alone)
        .chain([vec!["default"], names.clone()])
        .map(|wish| with_bindings(features, closure(features, &wish)))
        .filter(|on| seen.insert(on.clone()))
        .map(|on| on.into_iter().collect())
        .collect()
}

/// A choice that builds: the backend for NVIDIA devices needs one of the features that choose a version of its bindings.
fn with_bindings(features: &[(String, Vec<String>)], mut on: BTreeSet<String>) -> BTreeSet<String> {
    let is_bindings = |name: &str| name.starts_with("cuda-bindings-");
    if on.contains("cuda") && !on.iter().any(|name| is_bindings(name)) {
        on.extend(features.iter().map(|(name, _)| name).find(|name| is_bindings(name)).cloned());
    }
    on
}

/// What features switch on among the crate's own, without the name `default`.
fn closure(features: &[(String, Vec<String>)], wish: &[&str]) -> BTreeSet<String> {
    let mut on = BTreeSet::new();
    let mut open: Vec<&str> = wish.to_vec();
    while let Some(name) = open.pop() {
        let Some((_, more)) = features.iter().find(|(n, _)| n == name) else { continue };
        if on.insert(name.to_owned()) {
            open.extend(more.iter().map(String::as_str));
        }
    }
    on.remove("default");
    on
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(list: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        list.iter().map(|(n, on)| ((*n).to_owned(), on.iter().map(|&f| f.to_owned()).collect())).collect()
    }

    #[test]
    fn a_crate_without_features_is_built_once() {
        assert_eq!(choices(&[]), [Vec::<String>::new()]);
        assert_eq!(choices(&features(&[("default", &[])])), [Vec::<String>::new()]);
    }

    #[test]
    fn each_feature_alone_and_all_together() {
        let all = features(&[("a", &["dep:x"]), ("b", &["a", "x?/y"]), ("c", &[]), ("default", &["c"])]);
        let expected: [&[&str]; 5] = [&[], &["a"], &["a", "b"], &["c"], &["a", "b", "c"]];
        assert_eq!(choices(&all), expected);
    }

    #[test]
    fn the_backend_for_nvidia_is_built_with_bindings() {
        let all = features(&[("cuda", &["dep:x"]), ("cuda-bindings-1", &["x?/1"]), ("default", &["cuda-bindings-1"])]);
        let expected: [&[&str]; 3] = [&[], &["cuda", "cuda-bindings-1"], &["cuda-bindings-1"]];
        assert_eq!(choices(&all), expected);
    }

    #[test]
    fn a_single_default_feature_needs_two_builds() {
        let expected: [&[&str]; 2] = [&[], &["cpu"]];
        assert_eq!(choices(&features(&[("cpu", &["dep:rayon"]), ("default", &["cpu"])])), expected);
    }
}
