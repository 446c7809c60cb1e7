//! Runs other programs.

use std::process::Command;

/// Runs a program that must succeed; what it printed, both streams.
pub fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(|e| format!("{name}: {e}"))?;
    let text = [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned()).concat();
    if output.status.success() { Ok(text) } else { Err(format!("{name}: {}\n{}", output.status, text.trim_end())) }
}
