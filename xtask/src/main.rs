//! Checks of the workspace itself, and what builds its kernels.
//!
//! `cargo xtask <task>` prints what it looked at, and exits with status 1 and a list of all failures if there are any.

#![allow(unreachable_pub, reason = "a program has no outside: `pub` means the whole of it")]

mod answer;
mod bundle;
mod cargo;
mod features;
mod files;
mod licenses;
mod links;
mod markdown;
mod package;
mod parallel;
mod process;
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

/// Name, usage, and a command with arguments; `None` if they make no sense.
type Task = (&'static str, &'static str, fn(&[String], &mut Report) -> Option<Result<(), String>>);

const COMMANDS: [Task; 2] = [("bundle", bundle::USAGE, bundle::command), ("ptx", ptx::USAGE, ptx::command)];

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, arguments)) = wanted.split_first() else { return usage() };
    if let Some((name, usage, command)) = COMMANDS.iter().find(|(n, ..)| n == name) {
        let mut report = Report::new(name);
        return match command(arguments, &mut report) {
            Some(result) => finish(report, result),
            None => misuse(usage),
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
    COMMANDS.iter().for_each(|(_, usage, _)| eprintln!("{usage}"));
    ExitCode::from(2)
}

fn misuse(usage: &str) -> ExitCode {
    eprintln!("{usage}");
    ExitCode::from(2)
}
