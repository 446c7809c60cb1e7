//! Runs `ptxas` on a module and reads what it says.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use super::family::sha256;
use super::toolchain::{Assembler, Toolchain};
use crate::process::run;

/// What an entry needs on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub registers: u32,
    /// Statically allocated shared memory, in bytes.
    pub shared: u32,
    /// Local memory in bytes: stack frame, stores and loads of spilled registers.
    pub stack: u32,
    pub stores: u32,
    pub loads: u32,
}

impl Usage {
    /// Whether anything is kept in local memory.
    pub fn is_local(&self) -> bool {
        self.stack + self.stores + self.loads > 0
    }
}

/// What the assembler says of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assembled {
    /// What each entry needs.
    pub usage: BTreeMap<String, Usage>,
    /// Everything that is a warning.
    pub warnings: Vec<String>,
}

/// Assembles a module for a device, into the file `cubin`. The error holds what the assembler objects to.
pub fn assemble(
    toolchain: &Toolchain,
    assembler: Assembler,
    device: &str,
    ptx: &str,
    cubin: &Path,
) -> Result<Assembled, String> {
    read(&said(toolchain, assembler, device, ptx, cubin)?)
}

/// As [`assemble`], for what is said and not for the machine code: an answer that was given once is read again.
pub fn judge(toolchain: &Toolchain, assembler: Assembler, device: &str, ptx: &str) -> Result<Assembled, String> {
    let version = toolchain.assembler_version(assembler)?;
    let memory = toolchain.memory();
    let file = memory.join(sha256(format!("{version}\n{device}\n{ptx}").as_bytes()));
    if let Ok(text) = std::fs::read_to_string(&file) {
        return read(&text);
    }
    let io = |e: std::io::Error| format!("{}: {e}", memory.display());
    let scratch = tempfile::tempdir().map_err(io)?;
    let text = said(toolchain, assembler, device, ptx, &scratch.path().join("cubin"))?;
    // Moved into place, so that nobody reads half of it.
    let new = scratch.path().join("said");
    std::fs::create_dir_all(&memory).map_err(io)?;
    std::fs::write(&new, &text).map_err(io)?;
    std::fs::rename(&new, &file).or_else(|_| std::fs::write(&file, &text)).map_err(io)?;
    read(&text)
}

/// What `ptxas -v` prints about a module that it accepts.
fn said(toolchain: &Toolchain, assembler: Assembler, device: &str, ptx: &str, cubin: &Path) -> Result<String, String> {
    let module = tempfile::NamedTempFile::new().map_err(|e| format!("temporary file: {e}"))?;
    std::fs::write(module.path(), ptx).map_err(|e| format!("{}: {e}", module.path().display()))?;
    let mut command = Command::new(toolchain.assembler(assembler)?);
    command.arg("-v").arg(format!("-arch={device}")).arg(module.path()).arg("-o").arg(cubin);
    run(&mut command).map_err(|e| objections(&e, ptx))
}

/// Reads the answer to `ptxas -v`.
fn read(text: &str) -> Result<Assembled, String> {
    let mut usage = BTreeMap::new();
    let mut warnings = Vec::new();
    let mut entry: Option<String> = None;
    for line in text.lines() {
        let info = line.strip_prefix("ptxas info").map_or(line, |l| l.trim_start_matches([' ', ':']));
        if let Some(rest) = info.strip_prefix("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            usage.insert(name.clone(), Usage::default());
            entry = Some(name);
        } else if let Some(all) = entry.as_ref().and_then(|e| usage.get_mut(e)) {
            let number = |what: &str| before(info, what);
            if info.contains("bytes stack frame") {
                // A function that was not inlined has a line of its own, which counts for the entry before it.
                let numbers = [" bytes stack frame", " bytes spill stores", " bytes spill loads"].map(number);
                let [Some(stack), Some(stores), Some(loads)] = numbers else { return Err(format!("ptxas: {line}")) };
                (all.stack, all.stores, all.loads) = (all.stack + stack, all.stores + stores, all.loads + loads);
            } else if info.starts_with("Used ") {
                all.registers = number(" registers").ok_or_else(|| format!("ptxas: {line}"))?;
                all.shared = number(" bytes smem").unwrap_or(0);
            }
        }
        if line.contains("warning") || line.contains("Warning") || line.contains("Performance Loss") {
            warnings.push(line.trim().to_owned());
        }
    }
    Ok(Assembled { usage, warnings })
}

/// What the assembler objects to, each line with the instruction that it is about: the first few, as one mistake in a
/// source is many in a module.
fn objections(said: &str, ptx: &str) -> String {
    const SHOWN: usize = 5;
    let lines: Vec<_> = said.lines().filter(|l| l.contains("; error") || l.contains("fatal")).collect();
    if lines.is_empty() {
        return said.to_owned();
    }
    let instruction = |line: &str| {
        let number = before(line, "; error")?;
        ptx.lines().nth(usize::try_from(number).ok()?.checked_sub(1)?)
    };
    let told = lines.iter().take(SHOWN).map(|line| {
        let what = line.rsplit(" : ").next().unwrap_or(line);
        instruction(line).map_or_else(|| what.to_owned(), |i| format!("{what}: {i}"))
    });
    let more = lines.len().saturating_sub(SHOWN);
    let more = (more > 0).then(|| format!("… and {more} lines more"));
    told.chain(more).collect::<Vec<_>>().join("\n")
}

/// The number that stands before some words.
fn before(line: &str, words: &str) -> Option<u32> {
    let head = &line[..line.find(words)?];
    head.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_memory_and_warnings_are_read() {
        let text = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
            ptxas info    : Function properties for a\n\
            \x20   24 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]\n\
            ptxas info    : Compile time = 41.021 ms\n\
            ptxas info    : (C7510) Potential Performance Loss: wgmma serialized\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90'\n\
            ptxas info    : Function properties for helper\n\
            \x20   16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Function properties for b\n\
            \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 8 registers, 368 bytes cmem[0]\n";
        let Assembled { usage, warnings } = read(text).unwrap();
        assert_eq!(usage["a"], Usage { registers: 255, shared: 1024, stack: 24, stores: 4, loads: 8 });
        assert_eq!(usage["b"], Usage { registers: 8, stack: 16, ..Usage::default() });
        assert!(usage["a"].is_local() && usage["b"].is_local() && !Usage::default().is_local());
        assert_eq!(warnings.len(), 1);
        assert!(read("ptxas info : Compiling entry function 'a' for 'x'\nUsed no registers").is_err());
    }

    #[test]
    fn objections_name_the_instruction() {
        let said = "ptxas: exit status: 255\nptxas /tmp/module.ptx, line 2; error   : Modifier '.x' requires more\n\
            ptxas fatal   : Ptx assembly aborted due to errors";
        assert_eq!(
            objections(said, "ld.x %r1;\nld.y.x %r2;\n"),
            "Modifier '.x' requires more: ld.y.x %r2;\nPtx assembly aborted due to errors"
        );
        assert!(objections(&said.repeat(9), "").ends_with("… and 13 lines more"));
        assert_eq!(objections("no such file", ""), "no such file");
    }
}
