//! Checks of the workspace itself, and what builds its kernels.
//!
//! `cargo xtask <task>` prints what it looked at, and exits with status 1 and a list of all failures if there are any.

#![allow(unreachable_pub, reason = "a program has no outside: `pub` means the whole of it")]

mod answer;
mod cargo;
mod features;
mod files;
mod licenses;
mod links;
mod markdown;
mod package;
mod parallel;
mod ptx;
mod report;
mod structure;
mod tree;

use std::process::ExitCode;

use report::Report;

/// Name, what it checks, and the check.
type Check = (&'static str, &'static str, fn(&mut Report) -> Result<(), String>);

const CHECKS: [Check; 6] = [
    ("answer", "standard input is the JSON of `generate --json` and holds an answer", answer::check),
    (
        "features",
        "each crate builds without features, with each one alone and with all, without a warning",
        features::check,
    ),
    ("files", "length of source files, leftover markers, size of the tree, docs/structure.md", files::check),
    ("licenses", "the license of every dependency is one that may be used", licenses::check),
    ("links", "relative links in Markdown files lead somewhere", links::check),
    ("package", "what `cargo package` puts into each published crate", package::check),
];

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, arguments)) = wanted.split_first() else { return usage() };
    if name == "ptx" {
        let mut report = Report::new("ptx");
        return match ptx::command(arguments, &mut report) {
            Some(result) => finish(report, result),
            None => misuse(ptx::USAGE),
        };
    }
    let Some((name, _, check)) = CHECKS.iter().find(|(n, ..)| n == name && arguments.is_empty()) else {
        return usage();
    };
    let mut report = Report::new(name);
    let result = check(&mut report);
    finish(report, result)
}

fn finish(mut report: Report, result: Result<(), String>) -> ExitCode {
    if let Err(error) = result {
        report.fail(error);
    }
    report.finish()
}

fn usage() -> ExitCode {
    eprintln!("usage: cargo xtask <check>, where <check> is one of");
    for (name, what, _) in CHECKS {
        eprintln!("  {name:<10}{what}");
    }
    misuse(ptx::USAGE)
}

fn misuse(usage: &str) -> ExitCode {
    eprintln!("{usage}");
    ExitCode::from(2)
}
