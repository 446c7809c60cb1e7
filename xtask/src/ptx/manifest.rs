//! `ptx/manifest.toml`: what the committed modules were made of, how, and what is in them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;

use super::assembly::Usage;
use super::family::{CRATE, Source};
use super::module::Entry;
use crate::tree;

/// The file, inside the crate.
pub const FILE: &str = "ptx/manifest.toml";
/// Folder of the modules, inside the crate.
pub const FOLDER: &str = "ptx";

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Manifest {
    /// Number of the way in which modules are made and written down.
    pub format: u32,
    pub compiler: String,
    pub options: Vec<String>,
    /// What registers and local memory were read from.
    pub assembler: String,
    #[serde(default, rename = "family")]
    pub families: Vec<Family>,
}

/// A family of kernels.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Family {
    pub name: String,
    pub sources: Vec<Source>,
    #[serde(rename = "module")]
    pub modules: Vec<Module>,
}

/// The compiled family, for one target.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Module {
    pub target: String,
    /// The `.version`, and with it the oldest driver.
    pub version: String,
    /// Size of the file, compressed.
    pub compressed: usize,
    /// Size of the text.
    pub bytes: usize,
    /// Hash of the text.
    pub sha256: String,
    pub entries: Vec<Kernel>,
}

/// An entry of a module.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Kernel {
    pub name: String,
    /// Types of the parameters.
    pub parameters: Vec<String>,
    /// Static shared memory in bytes.
    pub shared: u32,
    /// Registers a thread, by device.
    pub registers: BTreeMap<String, u32>,
    /// Stack frame, stores and loads of spilled registers in bytes, by device; only where there are any.
    #[serde(default)]
    pub local: BTreeMap<String, [u32; 3]>,
}

impl Kernel {
    /// From what the module says and what the assembler says for some devices.
    pub fn new(entry: Entry, usages: &[(&str, Usage)]) -> Self {
        let local = usages.iter().filter(|(_, u)| u.is_local());
        Self {
            name: entry.name,
            parameters: entry.parameters,
            shared: usages.iter().map(|(_, u)| u.shared).max().unwrap_or(0),
            registers: usages.iter().map(|&(d, u)| (d.to_owned(), u.registers)).collect(),
            local: local.map(|&(d, u)| (d.to_owned(), [u.stack, u.stores, u.loads])).collect(),
        }
    }
}

/// Name of the file of a module, inside [`FOLDER`].
pub fn file_name(family: &str, target: &str) -> String {
    format!("{family}.{target}.ptx.z")
}

impl Manifest {
    /// The committed file; an empty one where there is none.
    pub fn read(root: &Path) -> Result<Self, String> {
        let file = root.join(CRATE).join(FILE);
        if !file.exists() {
            return Ok(Self::default());
        }
        toml::from_str(&tree::read(&root.join(CRATE), FILE)?).map_err(|e| format!("{CRATE}/{FILE}: {e}"))
    }

    /// A family that was written down.
    pub fn family(&self, name: &str) -> Option<&Family> {
        self.families.iter().find(|f| f.name == name)
    }

    /// Whether the modules of both were made in the same way.
    pub fn is_made_like(&self, other: &Self) -> bool {
        let way = |m: &Self| (m.format, m.compiler.clone(), m.options.clone(), m.assembler.clone());
        way(self) == way(other)
    }

    /// The text of the file; one line an entry, so that a change of one kernel is a change of one line.
    pub fn text(&self) -> String {
        let mut out = String::from("# What the modules in this folder were made of. Written by `cargo xtask ptx`.\n\n");
        let quoted = |list: &[String]| list.iter().map(|s| format!("\"{s}\"")).collect::<Vec<_>>().join(", ");
        let mut line = |text: String| out.write_fmt(format_args!("{text}\n")).unwrap_or_default();
        line(format!("format = {}", self.format));
        line(format!("compiler = \"{}\"", self.compiler));
        line(format!("options = [{}]", quoted(&self.options)));
        line(format!("assembler = \"{}\"", self.assembler));
        for family in &self.families {
            line(format!("\n[[family]]\nname = \"{}\"\nsources = [", family.name));
            for source in &family.sources {
                line(format!("    {{ file = \"{}\", sha256 = \"{}\" }},", source.file, source.sha256));
            }
            line("]".to_owned());
            for module in &family.modules {
                line(format!("\n[[family.module]]\ntarget = \"{}\"\nversion = \"{}\"", module.target, module.version));
                line(format!("compressed = {}\nbytes = {}", module.compressed, module.bytes));
                line(format!("sha256 = \"{}\"\nentries = [", module.sha256));
                module.entries.iter().for_each(|e| line(format!("    {},", e.text())));
                line("]".to_owned());
            }
        }
        out
    }
}

impl Kernel {
    fn text(&self) -> String {
        let registers: Vec<_> = self.registers.iter().map(|(d, n)| format!("{d} = {n}")).collect();
        let parameters: Vec<_> = self.parameters.iter().map(|p| format!("\"{p}\"")).collect();
        let local: Vec<_> = self.local.iter().map(|(d, [a, b, c])| format!("{d} = [{a}, {b}, {c}]")).collect();
        let local = if local.is_empty() { String::new() } else { format!(", local = {{ {} }}", local.join(", ")) };
        format!(
            "{{ name = \"{}\", parameters = [{}], shared = {}, registers = {{ {} }}{local} }}",
            self.name,
            parameters.join(", "),
            self.shared,
            registers.join(", "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let usage = Usage { registers: 40, shared: 1024, ..Usage::default() };
        let spilled = Usage { stack: 8, stores: 4, loads: 12, ..usage };
        let entry = |name: &str| Entry { name: name.to_owned(), parameters: vec!["u64".into(), "b8[24]".into()] };
        let entries = vec![
            Kernel::new(entry("a"), &[("sm_80", usage), ("sm_90", Usage { registers: 42, ..usage })]),
            Kernel::new(entry("b"), &[("sm_80", spilled)]),
        ];
        assert!(entries[0].local.is_empty() && entries[1].local["sm_80"] == [8, 4, 12]);
        let module = Module {
            target: "sm_80".into(),
            version: "7.0".into(),
            compressed: 10,
            bytes: 100,
            sha256: "00".into(),
            entries,
        };
        let sources = vec![Source { file: "kernels/x.cu".into(), sha256: "ff".into() }];
        let manifest = Manifest {
            format: 1,
            compiler: "c 1.2".into(),
            options: vec!["-a".into(), "--b=c".into()],
            assembler: "p 3".into(),
            families: vec![Family { name: "x".into(), sources, modules: vec![module] }],
        };
        assert_eq!(toml::from_str::<Manifest>(&manifest.text()).unwrap(), manifest);
        assert!(manifest.family("x").is_some() && manifest.family("y").is_none());
        assert!(!manifest.is_made_like(&Manifest::default()));
        let empty = Manifest { families: vec![], ..manifest.clone() };
        assert!(manifest.is_made_like(&toml::from_str(&empty.text()).unwrap()));
    }
}
