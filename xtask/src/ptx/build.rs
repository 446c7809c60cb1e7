//! From the source of a family to its modules.

use std::path::Path;

use super::assembly::{Assembled, Usage, judge};
use super::compiler::{Compiler, OPTIONS};
use super::family::{CRATE, FOLDER, Family, sha256};
use super::manifest::{self, Kernel, Manifest};
use super::module;
use super::target::Target;
use super::toolchain::{Assembler, Toolchain};

/// Number of the way in which modules are made; another number makes all of them anew.
const FORMAT: u32 = 1;
/// Best compression.
const LEVEL: u8 = 10;

/// What compiles families.
#[derive(Debug)]
pub struct Builder {
    pub toolchain: Toolchain,
    compiler: Compiler,
    options: Vec<String>,
}

/// A compiled module.
#[derive(Debug)]
pub struct Built {
    pub target: &'static Target,
    /// The shortened text.
    pub ptx: String,
    /// The compressed text.
    pub file: Vec<u8>,
    /// What goes into the manifest.
    pub record: manifest::Module,
    /// What compiler and assemblers warned of.
    pub warnings: Vec<String>,
}

/// The manifest of an empty project: how modules are made now.
pub fn way(toolchain: &Toolchain) -> Result<Manifest, String> {
    Ok(Manifest {
        format: FORMAT,
        compiler: format!("NVRTC {}", toolchain.compiler_version()?),
        options: OPTIONS.map(str::to_owned).into(),
        assembler: format!("ptxas {}", toolchain.assembler_version(Assembler::Release)?),
        families: Vec::new(),
    })
}

impl Builder {
    /// Loads the compiler, installing it where it is missing. Paths in messages are relative to the root.
    pub fn new(root: &Path, toolchain: Toolchain) -> Result<Self, String> {
        std::env::set_current_dir(root).map_err(|e| format!("{}: {e}", root.display()))?;
        let compiler = Compiler::load(&toolchain.compiler()?)?;
        let mut options: Vec<_> = OPTIONS.map(str::to_owned).into();
        options.push(format!("-I{CRATE}/{FOLDER}"));
        options.extend(toolchain.headers()?.iter().map(|folder| format!("-I{}", folder.display())));
        Ok(Self { toolchain, compiler, options })
    }

    /// The shortened text of a family for a target, and the compiler's warnings.
    pub fn compile(&self, family: &Family, target: &Target) -> Result<(String, String), String> {
        let architecture = format!("--gpu-architecture={}", target.compute);
        let options = [self.options.as_slice(), &[architecture]].concat();
        let compiled = self.compiler.compile(&family.path(), &family.text, &options)?;
        let ptx = module::shorten(&compiled.ptx, target).map_err(|e| format!("{}: {e}", family.path()))?;
        Ok((ptx, compiled.log))
    }

    /// Compiles a family for a target, and assembles it to see what it needs.
    pub fn build(&self, family: &Family, target: &'static Target) -> Result<Built, String> {
        let (ptx, log) = self.compile(family, target)?;
        let mut warnings: Vec<_> = Some(log).filter(|l| !l.is_empty()).into_iter().collect();
        let place = |device: &str| format!("{} for {}, on {device}", family.path(), target.name);
        let mut usages = Vec::new();
        for &device in target.measured {
            let assembled = judge(&self.toolchain, Assembler::Release, device, &ptx)
                .map_err(|e| format!("{}: {e}", place(device)))?;
            warnings.extend(assembled.warnings.iter().map(|w| format!("{}: {w}", place(device))));
            warnings.extend(local_memory(family, &assembled).map(|w| format!("{}: {w}", place(device))));
            usages.push((device, assembled.usage));
        }
        let mut entries = module::entries(&ptx).map_err(|e| format!("{}: {e}", family.path()))?;
        if entries.is_empty() {
            return Err(format!("{} has no kernel for {}", family.path(), target.name));
        }
        // The compiler's order is of no interest, and a new kernel should not move the others.
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let kernel = |entry: module::Entry| {
            let usages: Vec<(&str, Usage)> =
                usages.iter().map(|(d, u)| (*d, u.get(&entry.name).copied().unwrap_or_default())).collect();
            Kernel::new(entry, &usages)
        };
        let file = miniz_oxide::deflate::compress_to_vec_zlib(ptx.as_bytes(), LEVEL);
        let record = manifest::Module {
            target: target.name.to_owned(),
            version: target.version_text(),
            compressed: file.len(),
            bytes: ptx.len(),
            sha256: sha256(ptx.as_bytes()),
            entries: entries.into_iter().map(kernel).collect(),
        };
        Ok(Built { target, ptx, file, record, warnings })
    }
}

/// Entries that use local memory without being listed.
pub fn local_memory<'a>(family: &'a Family, assembled: &'a Assembled) -> impl Iterator<Item = String> + 'a {
    let unlisted = assembled.usage.iter().filter(|(name, u)| u.is_local() && !family.local_memory.contains(*name));
    unlisted.map(|(name, u)| {
        format!(
            "{name} uses local memory: {} bytes of stack, {} of spill stores, {} of spill loads",
            u.stack, u.stores, u.loads
        )
    })
}
