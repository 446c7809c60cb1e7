//! `cargo xtask bundle`: programs for a machine that has a GPU and no Rust.
//!
//! One archive of stripped programs and a script that runs them. What the tree carries anyway, the shipped model and the
//! fixtures of tests, is left out: the script is called from the root of a copy of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::cargo::{self, Member};
use crate::process::run;
use crate::report::Report;
use crate::tree;

/// How it is called.
pub const USAGE: &str = "\
usage: cargo xtask bundle [--tests] [--programs] [--out DIR]
                                             pack test programs, or examples and benchmarks (or both) for a GPU host";

/// Where the bundle goes.
const FOLDER: &str = "target/bundle";
/// Packages whose tests know the GPU, with the targets that are packed; none named are all.
const TESTED: [(&str, &[&str]); 3] =
    [("ninfer-core", &[]), ("ninfer-kernels", &[]), ("ninfer-examples", &["device", "streaming"])];
/// Crates with programs.
const PROGRAMS: [&str; 2] = ["ninfer-examples", "ninfer-benches"];
/// The feature that everything is built with, where a crate has it.
const FEATURE: &str = "cuda";
/// What runs the programs there.
const SCRIPT: &str = include_str!("../bundle/run.sh");
/// Most that a bundle may have, in bytes.
const BUDGET: u64 = 20 << 20;

#[derive(Debug, PartialEq, Eq)]
struct Request {
    tests: bool,
    programs: bool,
    out: PathBuf,
}

/// Runs the command; `None` if the arguments make no sense.
pub fn command(arguments: &[String], report: &mut Report) -> Option<Result<(), String>> {
    let request = parse(arguments)?;
    Some(pack(&tree::root(), &request, report))
}

fn parse(arguments: &[String]) -> Option<Request> {
    let mut request = Request { tests: false, programs: false, out: FOLDER.into() };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--tests" => request.tests = true,
            "--programs" => request.programs = true,
            "--out" => request.out = rest.next()?.into(),
            _ => return None,
        }
    }
    if !request.tests && !request.programs {
        (request.tests, request.programs) = (true, true);
    }
    Some(request)
}

fn pack(root: &Path, request: &Request, report: &mut Report) -> Result<(), String> {
    let members = cargo::members(root)?;
    let out = root.join(&request.out);
    let io = |e: std::io::Error| format!("{}: {e}", out.display());
    std::fs::create_dir_all(&out).map_err(io)?;
    let staged = tempfile::tempdir().map_err(|e| format!("temporary folder: {e}"))?;
    for folder in ["tests", "programs"] {
        std::fs::create_dir(staged.path().join(folder)).map_err(io)?;
    }
    std::fs::write(staged.path().join("root"), root.display().to_string()).map_err(io)?;

    let mut programs = Vec::new();
    if request.tests {
        for (package, targets) in TESTED {
            let mut what = vec!["test", "--no-run"];
            what.extend(targets.iter().flat_map(|target| ["--test", target]));
            // Programs that are built along with tests, because these may run them, are no tests.
            let built = build(root, &members, &[package], &what)?.into_iter().filter(|p| p.is_test);
            programs.extend(built.map(|p| (format!("tests/{}.{}", p.package, p.target), p.file)));
        }
    }
    if request.programs {
        let built = build(root, &members, &PROGRAMS, &["build", "--release", "--bins"])?;
        programs.extend(built.into_iter().map(|p| (format!("programs/{}", p.target), p.file)));
    }
    if programs.is_empty() {
        return Err("cargo built no program".to_owned());
    }
    for (name, file) in &programs {
        let packed = staged.path().join(name);
        strip(file, &packed)?;
        let size = |f: &Path| std::fs::metadata(f).map_or(0, |m| m.len() >> 10);
        report.checked(format!("{name}: {} KiB, stripped {} KiB", size(file), size(&packed)));
    }

    let (ending, compress) = compressor();
    for old in ["xz", "gz"] {
        let _ = std::fs::remove_file(out.join(format!("programs.tar.{old}")));
    }
    let archive = out.join(format!("programs.tar.{ending}"));
    run(Command::new("tar")
        .arg(format!("--use-compress-program={compress}"))
        .args(["--sort=name", "--owner=0", "--group=0", "-cf"])
        .arg(&archive)
        .arg("-C")
        .arg(staged.path())
        .args(["root", "tests", "programs"]))?;
    let script = out.join("run.sh");
    std::fs::write(&script, SCRIPT).map_err(io)?;
    executable(&script).map_err(io)?;

    let bytes = std::fs::metadata(&archive).map_err(io)?.len();
    report.checked(format!(
        "{} programs, {:.1} MiB of at most {} MiB: {}",
        programs.len(),
        bytes as f64 / f64::from(1 << 20),
        BUDGET >> 20,
        script.display()
    ));
    if bytes > BUDGET {
        report.fail(format!(
            "the bundle has {bytes} bytes, at most {BUDGET} are wanted; --tests or --programs packs less"
        ));
    }
    Ok(())
}

/// A program that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    package: String,
    target: String,
    is_test: bool,
    file: PathBuf,
}

/// Lets cargo build some packages with the feature, and lists the programs.
fn build(root: &Path, members: &[Member], packages: &[&str], what: &[&str]) -> Result<Vec<Program>, String> {
    let members = members.iter().filter(|m| packages.contains(&m.name.as_str()));
    let features: Vec<_> = members
        .filter(|m| m.features.iter().any(|(name, _)| name == FEATURE))
        .map(|m| format!("{}/{FEATURE}", m.name))
        .collect();
    let features = features.join(",");
    let mut arguments = what.to_vec();
    arguments.extend(["--locked", "--message-format=json-render-diagnostics"]);
    packages.iter().for_each(|package| arguments.extend(["--package", package]));
    if !features.is_empty() {
        arguments.extend(["--features", &features]);
    }
    println!("bundle: cargo {}", arguments.join(" "));
    let text = cargo::stdout(root, &arguments)?;
    let messages = text.lines().map(|l| serde_json::from_str(l).map_err(|e| format!("cargo: {e}: {l}")));
    let messages: Vec<Value> = messages.collect::<Result<_, _>>()?;
    Ok(messages.iter().filter_map(|m| program(root, m)).collect())
}

/// The program that a message of cargo is about, if any.
fn program(root: &Path, message: &Value) -> Option<Program> {
    let file = message["executable"].as_str()?;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.strip_prefix(root).ok()?;
    let target = cargo::text(&message["target"]["name"]);
    let kinds = cargo::array(&message["target"]["kind"]);
    // The unit tests of a library have the name of its crate.
    let target = if kinds.iter().any(|k| k == "lib") { "lib".to_owned() } else { target };
    let is_bench = kinds.iter().any(|k| k == "bench");
    let is_test = message["profile"]["test"].as_bool().unwrap_or(false);
    (!is_bench).then(|| Program { package: folder.display().to_string(), target, is_test, file: file.into() })
}

/// Copies a program without its symbols, or as it is where nothing strips.
fn strip(file: &Path, to: &Path) -> Result<(), String> {
    if run(Command::new("strip").arg("-o").arg(to).arg(file)).is_ok() {
        return Ok(());
    }
    std::fs::copy(file, to).map(|_| ()).map_err(|e| format!("{}: {e}", file.display()))
}

/// Ending and command of the best compressor at hand; programs share much code, so a wide window pays.
fn compressor() -> (&'static str, &'static str) {
    match run(Command::new("xz").arg("--version")) {
        Ok(_) => ("xz", "xz -9 -T1"),
        Err(_) => ("gz", "gzip -9"),
    }
}

#[cfg(unix)]
fn executable(file: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn executable(_: &Path) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_choose_what_is_packed() {
        let parsed = |line: &str| parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let request = |tests, programs, out: &str| Some(Request { tests, programs, out: out.into() });
        assert_eq!(parsed(""), request(true, true, FOLDER));
        assert_eq!(parsed("--tests"), request(true, false, FOLDER));
        assert_eq!(parsed("--out x --programs"), request(false, true, "x"));
        for wrong in ["--out", "x", "--all"] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn programs_are_found_among_the_messages() {
        let message = |kind: &str, executable: Value| {
            serde_json::json!({
                "reason": "compiler-artifact", "manifest_path": "/r/ninfer-core/Cargo.toml",
                "target": { "name": "x", "kind": [kind] }, "profile": { "test": kind != "bin" }, "executable": executable,
            })
        };
        let found = |kind| program(Path::new("/r"), &message(kind, "/t/x-123".into()));
        let expected = |target: &str, is_test| {
            Some(Program { package: "ninfer-core".into(), target: target.into(), is_test, file: "/t/x-123".into() })
        };
        assert_eq!(found("test"), expected("x", true));
        assert_eq!(found("bin"), expected("x", false));
        assert_eq!(found("lib"), expected("lib", true));
        assert_eq!(found("bench"), None);
        assert_eq!(program(Path::new("/r"), &message("lib", Value::Null)), None);
        assert_eq!(program(Path::new("/other"), &message("bin", "/t/x".into())), None);
    }
}
