//! What a check looked at and what it found.

use std::process::ExitCode;

/// Prints facts as they come and keeps failures for the end.
pub struct Report {
    name: &'static str,
    failures: Vec<String>,
}

impl Report {
    pub fn new(name: &'static str) -> Self {
        Self { name, failures: Vec::new() }
    }

    /// Something that was looked at.
    pub fn checked(&self, what: impl AsRef<str>) {
        println!("{}: {}", self.name, what.as_ref());
    }

    /// Something that is wrong.
    pub fn fail(&mut self, what: impl Into<String>) {
        self.failures.push(what.into());
    }

    /// Prints all failures; the status is 0 without any, else 1.
    pub fn finish(self) -> ExitCode {
        let Self { name, failures } = self;
        if failures.is_empty() {
            println!("{name}: ok");
            return ExitCode::SUCCESS;
        }
        for failure in &failures {
            eprintln!("{name}: FAILED: {failure}");
        }
        eprintln!("{name}: {} failed", failures.len());
        ExitCode::FAILURE
    }
}
