//! `cargo xtask ptx`: compiles the kernels, checks what is committed, shows machine code.

mod assembly;
mod build;
mod check;
mod compiler;
mod family;
mod images;
mod lock;
mod manifest;
mod module;
mod sass;
mod target;
mod toolchain;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::report::Report;
use crate::{parallel, tree};
use build::{Builder, Built};
use family::{CRATE, Family};
use lock::Lock;
use manifest::Manifest;
use target::Target;
use toolchain::Toolchain;

/// How it is called.
pub const USAGE: &str = "\
usage: cargo xtask ptx [--force] [FAMILY…]   compile the families whose sources changed
       cargo xtask ptx --check               rebuild all, compare with what is committed, assemble for every device
       cargo xtask ptx --sass FAMILY ENTRY [--arch sm_90]
                                             show the machine code of a kernel
  --toolchain DIR                            where compiler and assemblers are, or will be installed";

/// What is asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Request {
    force: bool,
    check: bool,
    sass: bool,
    arch: Option<String>,
    toolchain: Option<PathBuf>,
    names: Vec<String>,
}

/// Runs the command; `None` if the arguments make no sense.
pub fn command(arguments: &[String], report: &mut Report) -> Option<Result<(), String>> {
    let request = parse(arguments)?;
    Some(run(request, report))
}

fn parse(arguments: &[String]) -> Option<Request> {
    let mut request = Request::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--force" => request.force = true,
            "--check" => request.check = true,
            "--sass" => request.sass = true,
            "--arch" => request.arch = Some(rest.next()?.clone()),
            "--toolchain" => request.toolchain = Some(rest.next()?.into()),
            option if option.starts_with('-') => return None,
            name => request.names.push(name.to_owned()),
        }
    }
    let Request { force, check, sass, arch, names, .. } = &request;
    let fits = match (check, sass) {
        (false, false) => arch.is_none(),
        (true, false) => !force && arch.is_none() && names.is_empty(),
        (false, true) => !force && names.len() == 2,
        (true, true) => false,
    };
    fits.then_some(request)
}

fn run(request: Request, report: &mut Report) -> Result<(), String> {
    let root = tree::root();
    let toolchain = Toolchain::open(&root, request.toolchain)?;
    match request.names.as_slice() {
        [family, entry] if request.sass => sass::show(&root, toolchain, family, entry, request.arch.as_deref()),
        _ if request.check => check::check(&root, toolchain, report),
        names => update(&root, toolchain, names, request.force, report),
    }
}

/// Compiles what changed, and writes modules, manifest and table.
fn update(root: &Path, toolchain: Toolchain, names: &[String], force: bool, report: &mut Report) -> Result<(), String> {
    let all = family::names(root)?;
    if let Some(unknown) = names.iter().find(|n| !all.contains(n)) {
        return Err(format!("there is no {CRATE}/kernels/{unknown}.cu"));
    }
    let old = Manifest::read(root)?;
    let way = build::way(&toolchain)?;
    let is_remade = !old.families.is_empty() && !old.is_made_like(&way);
    let wanted = if names.is_empty() || is_remade { &all } else { names };

    let mut stale = Vec::new();
    for name in wanted {
        match Family::read(root, name) {
            Ok(family) if force || is_remade || !is_current(root, &old, &family) => stale.push(family),
            Ok(_) => report.checked(format!("{name} is up to date")),
            Err(error) => report.fail(error),
        }
    }
    let mut built = Vec::new();
    if !stale.is_empty() {
        let builder = Builder::new(root, toolchain)?;
        for (family, modules) in stale.iter().zip(build_all(&builder, &stale)) {
            match modules {
                Ok(modules) => built.push((family, modules)),
                Err(errors) => errors.into_iter().for_each(|e| report.fail(e)),
            }
        }
    }

    // Read again, since another run may have written in the meantime.
    let _lock = Lock::take(&root.join("target"))?;
    let all = family::names(root)?;
    let mut manifest = Manifest { families: Manifest::read(root)?.families, ..way };
    if is_remade && built.len() < stale.len() {
        return Err("nothing is written, since modules made in different ways cannot stand side by side".to_owned());
    }
    for (family, modules) in &built {
        for module in modules {
            let file = manifest::file_name(&family.name, module.target.name);
            write(root, &format!("{}/{file}", manifest::FOLDER), &module.file)?;
            report.checked(described(family, module));
            module.warnings.iter().for_each(|w| println!("warning: {w}"));
        }
        manifest.families.retain(|f| f.name != family.name);
        let modules = modules.iter().map(|m| m.record.clone()).collect();
        manifest.families.push(manifest::Family {
            name: family.name.clone(),
            sources: family.sources.clone(),
            modules,
        });
    }
    manifest.families.retain(|f| all.contains(&f.name));
    manifest.families.sort_by(|a, b| a.name.cmp(&b.name));
    for file in leftovers(root, &manifest)? {
        report.checked(format!("{file} belongs to no family and is removed"));
        let path = root.join(CRATE).join(&file);
        std::fs::remove_file(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    write(root, manifest::FILE, manifest.text().as_bytes())?;
    write(root, images::FILE, images::text(root, &manifest)?.as_bytes())
}

/// A line on a module.
fn described(family: &Family, module: &Built) -> String {
    let record = &module.record;
    let registers = record.entries.iter().flat_map(|e| e.registers.values()).max().unwrap_or(&0);
    format!(
        "{} for {}: {} kernels with up to {registers} registers, {} KiB of PTX {}, {} KiB compressed",
        family.name,
        record.target,
        record.entries.len(),
        record.bytes.div_ceil(1024),
        record.version,
        record.compressed.div_ceil(1024),
    )
}

/// Whether the written modules of a family are those of its sources and targets.
fn is_current(root: &Path, manifest: &Manifest, family: &Family) -> bool {
    let Some(written) = manifest.family(&family.name) else { return false };
    let targets = written.modules.iter().map(|m| (m.target.as_str(), m.version.clone()));
    let is_there = |target: &str| {
        let file = manifest::file_name(&family.name, target);
        root.join(CRATE).join(manifest::FOLDER).join(file).is_file()
    };
    written.sources == family.sources
        && targets.eq(family.targets.iter().map(|t| (t.name, t.version_text())))
        && written.modules.iter().all(|m| is_there(&m.target) && is_measured(m))
}

/// Whether the registers of a module were written down for the devices of its target.
fn is_measured(module: &manifest::Module) -> bool {
    let devices: BTreeSet<_> = Target::named(&module.target).into_iter().flat_map(|t| t.measured).copied().collect();
    module.entries.iter().all(|e| devices.iter().copied().eq(e.registers.keys().map(String::as_str)))
}

/// Builds each family for each of its targets, or says what is wrong.
fn build_all(builder: &Builder, families: &[Family]) -> Vec<Result<Vec<Built>, Vec<String>>> {
    let jobs = families.iter().flat_map(|f| f.targets.iter().map(move |&t| (f, t))).collect();
    let mut results = parallel::map(jobs, |(family, target)| builder.build(family, target)).into_iter();
    let mut of = |family: &Family| {
        let (mut modules, mut errors) = (Vec::new(), Vec::new());
        for result in results.by_ref().take(family.targets.len()) {
            match result {
                Ok(module) => modules.push(module),
                // The same mistake shows for each target.
                Err(error) if !errors.contains(&error) => errors.push(error),
                Err(_) => {}
            }
        }
        if errors.is_empty() { Ok(modules) } else { Err(errors) }
    };
    families.iter().map(&mut of).collect()
}

/// Files in the folder of the modules that the manifest does not know, as paths inside the crate.
fn leftovers(root: &Path, manifest: &Manifest) -> Result<Vec<String>, String> {
    let modules =
        manifest.families.iter().flat_map(|f| f.modules.iter().map(|m| manifest::file_name(&f.name, &m.target)));
    let known: BTreeSet<String> = modules.collect();
    let folder = root.join(CRATE).join(manifest::FOLDER);
    let mut leftovers = Vec::new();
    for entry in std::fs::read_dir(&folder).into_iter().flatten() {
        let name = entry.map_err(|e| format!("{}: {e}", folder.display()))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ptx.z") && !known.contains(&name) {
            leftovers.push(format!("{}/{name}", manifest::FOLDER));
        }
    }
    leftovers.sort();
    Ok(leftovers)
}

/// Writes a file of the crate in one step, if it changed: a build that runs meanwhile sees the old or the new one.
fn write(root: &Path, file: &str, bytes: &[u8]) -> Result<(), String> {
    let path = root.join(CRATE).join(file);
    if std::fs::read(&path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let io = |e: std::io::Error| format!("{}: {e}", path.display());
    let folder = path.parent().unwrap_or(root);
    std::fs::create_dir_all(folder).map_err(io)?;
    let new = folder.join(format!(".{}.new", std::process::id()));
    std::fs::write(&new, bytes).map_err(io)?;
    std::fs::rename(&new, &path).map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Option<Request> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_that_go_together_are_taken() {
        assert_eq!(parsed("").unwrap(), Request::default());
        assert_eq!(parsed("a --force b").unwrap().names, ["a", "b"]);
        assert!(parsed("--check --toolchain x").unwrap().toolchain.is_some());
        assert_eq!(parsed("--sass a b --arch sm_80").unwrap().arch.as_deref(), Some("sm_80"));
        for wrong in
            ["--check a", "--check --force", "--sass a", "--arch sm_80", "--sass a b c", "--nothing", "--toolchain"]
        {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn modules_of_nothing_are_left_over() {
        let root = tempfile::tempdir().unwrap();
        assert!(leftovers(root.path(), &Manifest::default()).unwrap().is_empty());
        write(root.path(), "ptx/a.sm_80.ptx.z", b"x").unwrap();
        write(root.path(), "ptx/manifest.toml", b"x").unwrap();
        assert_eq!(leftovers(root.path(), &Manifest::default()).unwrap(), ["ptx/a.sm_80.ptx.z"]);
    }
}
