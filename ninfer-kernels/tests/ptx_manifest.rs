//! Whether the committed modules are those of the committed sources. Needs no compiler: hashes of the sources stand in
//! `ptx/manifest.toml`, and what `cargo xtask ptx` wrote there must be found in the modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ninfer_core::capability::{PtxIsa, SHIPPED, Target};
use sha2::{Digest, Sha256};
use toml::{Table, Value};

/// Most that all compressed modules may take together, in bytes.
const BUDGET: usize = 2_000_000;
/// What a stale file asks for.
const HELP: &str = "run `cargo xtask ptx`";

fn package() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> Vec<u8> {
    std::fs::read(package().join(file)).unwrap_or_else(|e| panic!("{file}: {e}; {HELP}"))
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Names of the files of a folder with an ending, without it.
fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(package().join(folder)).unwrap_or_else(|e| panic!("{folder}: {e}"));
    let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter_map(|n| n.strip_suffix(ending).map(str::to_owned)).collect()
}

fn text<'t>(table: &'t Table, key: &str) -> &'t str {
    table[key].as_str().unwrap_or_else(|| panic!("{key} is no text: {table:?}"))
}

fn number(table: &Table, key: &str) -> usize {
    usize::try_from(table[key].as_integer().unwrap_or_else(|| panic!("{key} is no number: {table:?}"))).unwrap()
}

fn tables<'t>(table: &'t Table, key: &str) -> impl Iterator<Item = &'t Table> {
    let list = table[key].as_array().unwrap_or_else(|| panic!("{key} is no list: {table:?}"));
    list.iter().map(|v| v.as_table().unwrap())
}

fn manifest() -> Table {
    String::from_utf8(read("ptx/manifest.toml")).unwrap().parse().unwrap()
}

/// A module of the manifest.
struct Module {
    name: String,
    table: Table,
}

impl Module {
    fn file(&self) -> Vec<u8> {
        read(&format!("ptx/{}.ptx.z", self.name))
    }

    fn ptx(&self) -> String {
        let bytes = miniz_oxide::inflate::decompress_to_vec_zlib(&self.file());
        String::from_utf8(bytes.unwrap_or_else(|e| panic!("{}: {e}", self.name))).unwrap()
    }
}

fn modules() -> Vec<Module> {
    let of = |family: &Table| {
        let name = text(family, "name").to_owned();
        let of = |m: &Table| Module { name: format!("{name}.{}", text(m, "target")), table: m.clone() };
        tables(family, "module").map(of).collect::<Vec<_>>()
    };
    tables(&manifest(), "family").flat_map(of).collect()
}

/// The headers in quotes that a source reaches, and the source itself, as paths inside the package.
fn closure(source: &str) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    let mut open = vec![PathBuf::from(source)];
    while let Some(file) = open.pop() {
        let name = file.to_str().unwrap().to_owned();
        let text = String::from_utf8(read(&name)).unwrap();
        if !seen.insert(name) {
            continue;
        }
        for line in text.lines().filter(|l| l.trim_start().starts_with("#include \"")) {
            let header = line.split('"').nth(1).unwrap();
            let beside = [file.parent().unwrap(), Path::new("kernels")].map(|f| f.join(header));
            open.push(beside.into_iter().find(|f| package().join(f).is_file()).unwrap_or_else(|| panic!("{line}")));
        }
    }
    seen
}

#[test]
fn modules_are_as_new_as_their_sources() {
    let mut names = BTreeSet::new();
    for family in tables(&manifest(), "family") {
        let name = text(family, "name");
        names.insert(name.to_owned());
        let hashes: BTreeMap<_, _> = tables(family, "sources").map(|s| (text(s, "file"), text(s, "sha256"))).collect();
        let sources = closure(&format!("kernels/{name}.cu"));
        assert!(hashes.keys().copied().eq(sources.iter().map(String::as_str)), "{name} has other headers now: {HELP}");
        for (file, hash) in hashes {
            assert_eq!(sha256(&read(file)), hash, "{file} changed since {name} was compiled: {HELP} {name}");
        }
    }
    assert_eq!(names, stems("kernels", ".cu"), "sources come and go with their modules: {HELP}");
}

#[test]
fn modules_decompress_to_what_was_written_down() {
    let modules = modules();
    for module in &modules {
        let ptx = module.ptx();
        assert_eq!(module.file().len(), number(&module.table, "compressed"), "{}", module.name);
        assert_eq!(ptx.len(), number(&module.table, "bytes"), "{}", module.name);
        assert_eq!(sha256(ptx.as_bytes()), text(&module.table, "sha256"), "{}", module.name);
    }
    let files: BTreeSet<_> = modules.iter().map(|m| m.name.clone()).collect();
    assert_eq!(files, stems("ptx", ".ptx.z"), "{HELP}");
    let bytes: usize = modules.iter().map(|m| m.file().len()).sum();
    assert!(bytes <= BUDGET, "{bytes} bytes of compressed modules");
}

#[test]
fn modules_are_stamped_with_the_version_of_their_target() {
    let targets: BTreeMap<&str, Target> = SHIPPED.iter().map(|t| (t.name(), *t)).collect();
    for module in modules() {
        let target = targets[text(&module.table, "target")];
        assert_eq!(text(&module.table, "version").parse::<PtxIsa>().unwrap(), target.ptx(), "{}", module.name);
        let ptx = module.ptx();
        let head: Vec<_> = ptx.lines().take(3).collect();
        let version = format!(".version {}", target.ptx());
        assert_eq!(head, [version, format!(".target {target}"), ".address_size 64".to_owned()], "{}", module.name);
    }
}

#[test]
fn entries_are_those_of_the_modules() {
    for module in modules() {
        let ptx = module.ptx();
        let marks = ptx.lines().filter_map(|l| l.strip_prefix(".visible .entry "));
        let mut names: Vec<_> = marks.map(|l| l.split('(').next().unwrap()).collect();
        names.sort_unstable();
        let entries: Vec<_> = tables(&module.table, "entries").collect();
        assert!(entries.iter().map(|e| text(e, "name")).eq(names), "{}", module.name);
        for entry in entries {
            let name = text(entry, "name");
            let counted =
                ptx.lines().filter(|l| l.starts_with(".param ") && l.contains(&format!(" {name}_param_"))).count();
            assert_eq!(entry["parameters"].as_array().unwrap().len(), counted, "{name}");
            let registers = entry["registers"].as_table().unwrap();
            let used = |v: &Value| v.as_integer().is_some_and(|n| (1..=255).contains(&n));
            assert!(!registers.is_empty() && registers.values().all(used), "{name}: {registers:?}");
        }
    }
}

#[test]
fn the_table_in_the_library_has_every_module() {
    let table = String::from_utf8(read("src/cuda/images.rs")).unwrap();
    let modules = modules();
    assert_eq!(table.matches("include_bytes!").count(), modules.len(), "{HELP}");
    for module in modules {
        assert!(table.contains(&format!("include_bytes!(\"../../ptx/{}.ptx.z\")", module.name)), "{}", module.name);
    }
}
