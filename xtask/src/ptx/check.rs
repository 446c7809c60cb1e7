//! `cargo xtask ptx --check`: whether the committed modules are those of the sources, and every device takes them.

use std::path::Path;

use super::assembly::judge;
use super::build::{self, Builder, Built, local_memory};
use super::family::{self, CRATE, Family};
use super::manifest::{self, Manifest};
use super::toolchain::{Assembler, Toolchain};
use super::{build_all, images, leftovers, module};
use crate::parallel;
use crate::report::Report;

/// Most that all compressed modules may take together, in bytes.
const BUDGET: usize = 2_000_000;

pub fn check(root: &Path, toolchain: Toolchain, report: &mut Report) -> Result<(), String> {
    let names = family::names(root)?;
    let families = names.iter().map(|n| Family::read(root, n)).collect::<Result<Vec<_>, _>>()?;
    let mut expected = build::way(&toolchain)?;
    let builder = Builder::new(root, toolchain)?;

    let mut modules = Vec::new();
    for (family, built) in families.iter().zip(build_all(&builder, &families)) {
        match built {
            Ok(built) => {
                let records = built.iter().map(|b| b.record.clone()).collect();
                let (name, sources) = (family.name.clone(), family.sources.clone());
                expected.families.push(manifest::Family { name, sources, modules: records });
                modules.extend(built.into_iter().map(|b| (family, b)));
            }
            Err(errors) => errors.into_iter().for_each(|e| report.fail(e)),
        }
    }
    for (family, module) in &modules {
        compare(root, family, module, report);
        module.warnings.iter().for_each(|w| report.fail(w));
    }
    let same = |file: &str, text: &str| std::fs::read(root.join(CRATE).join(file)).is_ok_and(|t| t == text.as_bytes());
    for (file, text) in [(manifest::FILE, expected.text()), (images::FILE, images::text(root, &expected)?)] {
        if !same(file, &text) {
            report.fail(format!("{CRATE}/{file} is not what `cargo xtask ptx` writes"));
        }
    }
    for file in leftovers(root, &expected)? {
        report.fail(format!("{CRATE}/{file} belongs to no family"));
    }
    let bytes: usize = modules.iter().map(|(_, m)| m.file.len()).sum();
    let kernels: usize = modules.iter().map(|(_, m)| m.record.entries.len()).sum();
    report.checked(format!(
        "{} families, {} modules rebuilt, {kernels} kernels, {} kB of at most {} kB",
        families.len(),
        modules.len(),
        bytes / 1000,
        BUDGET / 1000
    ));
    if bytes > BUDGET {
        report.fail(format!("the compressed modules have {bytes} bytes, at most {BUDGET} are wanted"));
    }
    report.checked(leanest(&expected));
    assemble(&builder, &modules, report)
}

/// Whether a rebuilt module is the committed one.
fn compare(root: &Path, family: &Family, built: &Built, report: &mut Report) {
    let name = format!("{CRATE}/{}/{}", manifest::FOLDER, manifest::file_name(&family.name, built.target.name));
    let old = std::fs::read(root.join(&name)).unwrap_or_default();
    if old == built.file {
        return;
    }
    let text = miniz_oxide::inflate::decompress_to_vec_zlib(&old);
    let how = match text {
        Ok(text) if text == built.ptx.as_bytes() => "is compressed in another way",
        Ok(_) => "is not what its sources compile to",
        Err(_) if old.is_empty() => "is missing",
        Err(_) => "does not decompress",
    };
    report.fail(format!("{name} {how}: run `cargo xtask ptx {}`", family.name));
}

/// The line with which registers can be watched.
fn leanest(manifest: &Manifest) -> String {
    let modules = manifest.families.iter().flat_map(|f| &f.modules);
    let kernels: Vec<_> = modules.flat_map(|m| &m.entries).collect();
    let local = kernels.iter().filter(|k| !k.local.is_empty()).count();
    let most = kernels.iter().filter_map(|k| Some((k.registers.values().max()?, &k.name))).max();
    let most = most.map_or_else(String::new, |(n, name)| format!(", the most registers are {n}, of {name}"));
    format!("{local} kernels with local memory{most}")
}

/// Assembles everything for everything, and sees that what must be refused is.
fn assemble(builder: &Builder, modules: &[(&Family, Built)], report: &mut Report) -> Result<(), String> {
    // Installed here and not by all threads at once.
    for assembler in [Assembler::Oldest, Assembler::Newest] {
        builder.toolchain.assembler(assembler)?;
    }
    let jobs: Vec<_> = modules
        .iter()
        .flat_map(|(family, built)| built.target.assemblies().into_iter().map(move |(a, d)| (*family, built, a, d)))
        .collect();
    report.checked(format!("{} assemblies by ptxas of {}", jobs.len(), versions(builder, &jobs)?));
    let findings = parallel::map(jobs, |(family, built, assembler, device)| {
        let place = format!("{} for {}, on {device} by {assembler:?}", family.path(), built.target.name);
        match judge(&builder.toolchain, assembler, device, &built.ptx) {
            // What an old driver spills is told, but cannot always be helped.
            Ok(a) => {
                local_memory(family, &a).map(|w| (assembler == Assembler::Oldest, format!("{place}: {w}"))).collect()
            }
            Err(error) => vec![(false, format!("{place}: {error}"))],
        }
    });
    for (is_old, finding) in findings.into_iter().flatten() {
        if is_old {
            report.checked(finding);
        } else {
            report.fail(finding);
        }
    }
    for (family, built) in modules {
        let Some(plain) = built.target.refused_by else { continue };
        let ptx = module::retarget(&built.ptx, built.target.name, plain);
        let what = format!("{} for {} as {plain}", family.name, built.target.name);
        match judge(&builder.toolchain, Assembler::Newest, plain, &ptx) {
            Ok(_) => report.fail(format!("{what} assembles: the family needs no {}", built.target.name)),
            Err(_) => report.checked(format!("{what} is refused, as it should be")),
        }
    }
    Ok(())
}

fn versions(builder: &Builder, jobs: &[(&Family, &Built, Assembler, &str)]) -> Result<String, String> {
    let mut used: Vec<_> = jobs.iter().map(|(_, _, assembler, _)| *assembler).collect();
    used.sort();
    used.dedup();
    let versions = used.into_iter().map(|a| builder.toolchain.assembler_version(a)).collect::<Result<Vec<_>, _>>()?;
    Ok(versions.join(", "))
}
