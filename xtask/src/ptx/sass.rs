//! `cargo xtask ptx --sass`: the machine code of one kernel.

use std::path::Path;
use std::process::Command;

use super::assembly::assemble;
use super::build::Builder;
use super::family::Family;
use super::target::Target;
use super::toolchain::{Assembler, Toolchain};
use crate::process::run;

/// The device of which code is shown unless another is named.
const DEVICE: &str = "sm_90";

/// Compiles a family and prints one of its kernels as assembled for a device.
pub fn show(root: &Path, toolchain: Toolchain, family: &str, entry: &str, device: Option<&str>) -> Result<(), String> {
    let family = Family::read(root, family)?;
    let device = device.unwrap_or(DEVICE);
    let builder = Builder::new(root, toolchain)?;
    let program = builder.toolchain.disassembler()?;
    let cubin = tempfile::NamedTempFile::new().map_err(|e| format!("temporary file: {e}"))?;
    let mut refusals = Vec::new();
    for target in fitting(&family, device) {
        let (ptx, _) = builder.compile(&family, target)?;
        let device = device_of(target, device);
        let assembled = assemble(&builder.toolchain, Assembler::Release, device, &ptx, cubin.path())?;
        let Some(usage) = assembled.usage.get(entry) else {
            let names: Vec<_> = assembled.usage.keys().map(String::as_str).collect();
            refusals.push(format!("{} for {} has only {}", family.name, target.name, names.join(", ")));
            continue;
        };
        let text = run(Command::new(&program).arg("-c").arg(cubin.path()))?;
        let code = section(&text, entry).ok_or_else(|| format!("{entry} has no section in the machine code"))?;
        println!("{code}");
        println!("{entry}, compiled for {}, assembled for {device}: {} instructions", target.name, instructions(code));
        println!("{} registers, {} bytes of static shared memory", usage.registers, usage.shared);
        println!("{} bytes of stack, {} of spill stores, {} of spill loads", usage.stack, usage.stores, usage.loads);
        assembled.warnings.iter().for_each(|w| println!("{w}"));
        return Ok(());
    }
    refusals.push(format!("no module of {} has {entry} and runs on {device}", family.name));
    Err(refusals.join("\n"))
}

/// The targets of a family that a device runs, most specific first.
fn fitting(family: &Family, device: &str) -> Vec<&'static Target> {
    let runs = |t: &&&Target| t.devices.iter().any(|&d| d == device || d == format!("{device}a"));
    family.targets.iter().rev().filter(runs).copied().collect()
}

/// What the assembler must be asked for: code for `sm_90a` is not assembled for `sm_90`.
fn device_of(target: &Target, device: &str) -> &'static str {
    let exact = target.devices.iter().find(|&&d| d == device);
    exact.or_else(|| target.devices.first()).copied().unwrap_or(target.name)
}

/// The part of a disassembly that holds an entry.
fn section<'t>(text: &'t str, entry: &str) -> Option<&'t str> {
    let head = format!("\t.section\t.text.{entry},");
    let start = text.find(&head)?;
    let rest = &text[start + head.len()..];
    // The next section begins with a ruled comment.
    let length = ["\t.section\t", "//---"].iter().filter_map(|next| rest.find(next)).min().unwrap_or(rest.len());
    Some(text[start..start + head.len() + length].trim_end())
}

/// Number of instructions in a disassembly: lines that begin with an address.
fn instructions(code: &str) -> usize {
    code.lines().filter(|l| l.trim_start().starts_with("/*")).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_cut_out_of_a_disassembly() {
        let text = "\t.section\t.text.ab,\"ax\",@progbits\n  /*0000*/  MOV ;\n\t.section\t.text.a,\"ax\",@progbits\n\
            .text.a:\n  /*0000*/  MOV R1, c ;\n  /*0010*/ @P0 EXIT ;\n\n//----- \n\t.section\t.nv.x,\"a\"\nz\n";
        let code = section(text, "a").unwrap();
        assert!(code.contains("EXIT") && !code.contains(".nv.x") && !code.contains(".text.ab"), "{code}");
        assert_eq!(instructions(code), 2);
        assert_eq!(section(text, "b"), None);
    }
}
