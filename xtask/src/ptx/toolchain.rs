//! The compiler and the assemblers: pinned wheels, installed where they are not yet.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::run;
use crate::tree;

/// The list of wheels.
pub const LOCK: &str = "xtask/cuda-toolchain.txt";
/// Where the wheels go, unless [`VARIABLE`] or an option says otherwise.
const FOLDER: &str = "target/cuda-toolchain";
/// Names another folder for the wheels.
pub const VARIABLE: &str = "NINFER_CUDA_TOOLCHAIN";

/// Marks a folder as one that can be made again, for backups and for the checks of the tree.
const CACHE: &str = "Signature: 8a477f597d28d172789f06886806bc55\n# Installed by cargo xtask ptx.\n";

/// One of the assemblers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Assembler {
    /// Of the oldest driver that is supported.
    Oldest,
    /// Of the compiler's release; what registers and spills are read from.
    Release,
    /// The newest.
    Newest,
}

/// A line of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Wheel {
    package: String,
    version: String,
    line: String,
}

/// Installed wheels.
#[derive(Debug)]
pub struct Toolchain {
    folder: PathBuf,
    wheels: Vec<Wheel>,
}

impl Toolchain {
    /// Reads the list; installs nothing yet.
    pub fn open(root: &Path, folder: Option<PathBuf>) -> Result<Self, String> {
        let folder = folder.or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let wheels = parse(&tree::read(root, LOCK)?)?;
        Ok(Self { folder: root.join(folder.unwrap_or_else(|| FOLDER.into())), wheels })
    }

    /// Version of the compiler, known without having it.
    pub fn compiler_version(&self) -> Result<&str, String> {
        Ok(&self.wheel("nvidia-cuda-nvrtc-cu12")?.version)
    }

    /// Version of an assembler, known without having it.
    pub fn assembler_version(&self, assembler: Assembler) -> Result<&str, String> {
        Ok(&self.assembler_wheel(assembler)?.version)
    }

    /// The library of the compiler.
    pub fn compiler(&self) -> Result<PathBuf, String> {
        self.file(self.wheel("nvidia-cuda-nvrtc-cu12")?, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    }

    /// The folders of the headers that come with the compiler.
    pub fn headers(&self) -> Result<[PathBuf; 2], String> {
        Ok([
            self.file(self.wheel("nvidia-cuda-runtime-cu12")?, "nvidia/cuda_runtime/include")?,
            self.file(self.wheel("nvidia-cuda-cccl-cu12")?, "nvidia/cuda_cccl/include")?,
        ])
    }

    /// The program `ptxas`.
    pub fn assembler(&self, assembler: Assembler) -> Result<PathBuf, String> {
        let wheel = self.assembler_wheel(assembler)?;
        let folder = if assembler == Assembler::Newest { "cu13" } else { "cuda_nvcc" };
        self.file(wheel, &format!("nvidia/{folder}/bin/ptxas"))
    }

    /// The program `nvdisasm`.
    pub fn disassembler(&self) -> Result<PathBuf, String> {
        self.file(self.wheel("nvidia-cuda-nvdisasm")?, "nvidia/cu13/bin/nvdisasm")
    }

    /// Folder of what assemblers said.
    pub fn memory(&self) -> PathBuf {
        self.folder.join("said")
    }

    fn assembler_wheel(&self, assembler: Assembler) -> Result<&Wheel, String> {
        let mut old: Vec<_> = self.wheels.iter().filter(|w| w.package == "nvidia-cuda-nvcc-cu12").collect();
        old.sort_by_key(|w| numbers(&w.version));
        match (assembler, old.as_slice()) {
            (Assembler::Newest, _) => self.wheel("nvidia-cuda-nvcc"),
            (Assembler::Oldest, [first, _]) => Ok(first),
            (Assembler::Release, [_, last]) => Ok(last),
            _ => Err(format!("{LOCK} needs two versions of nvidia-cuda-nvcc-cu12")),
        }
    }

    fn wheel(&self, package: &str) -> Result<&Wheel, String> {
        self.wheels.iter().find(|w| w.package == package).ok_or_else(|| format!("{LOCK} has no {package}"))
    }

    /// A file of a wheel, which is installed first where it is missing.
    fn file(&self, wheel: &Wheel, path: &str) -> Result<PathBuf, String> {
        let folder = self.folder.join(format!("{}-{}", wheel.package, wheel.version));
        if !folder.is_dir() {
            self.install(wheel, &folder)?;
        }
        let file = folder.join(path);
        if file.exists() {
            Ok(file)
        } else {
            Err(format!("{} is missing: remove {}", file.display(), folder.display()))
        }
    }

    /// Each wheel has a folder of its own, since two versions of one package share their file names.
    fn install(&self, wheel: &Wheel, folder: &Path) -> Result<(), String> {
        println!("ptx: installing {} {} into {}", wheel.package, wheel.version, folder.display());
        let io = |e: std::io::Error| format!("{}: {e}", self.folder.display());
        std::fs::create_dir_all(&self.folder).map_err(io)?;
        std::fs::write(self.folder.join("CACHEDIR.TAG"), CACHE).map_err(io)?;
        let scratch = tempfile::tempdir_in(&self.folder).map_err(io)?;
        let list = scratch.path().join("wheel.txt");
        std::fs::write(&list, &wheel.line).map_err(io)?;
        let new = scratch.path().join("new");
        let pip = self.pip()?;
        let mut command = Command::new(&pip);
        command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]);
        command.args(["--no-compile", "--disable-pip-version-check", "--target"]).arg(&new).arg("--requirement");
        run(command.arg(&list))?;
        match std::fs::rename(&new, folder) {
            // Another run may have installed the same in the meantime.
            Err(_) if folder.is_dir() => Ok(()),
            result => result.map_err(io),
        }
    }

    /// A Python with pip: in an environment of its own, or the system's where that cannot be made.
    fn pip(&self) -> Result<PathBuf, String> {
        let environment = self.folder.join("venv");
        let python = environment.join("bin/python3");
        if python.exists() {
            return Ok(python);
        }
        let Err(error) = run(Command::new("python3").args(["-m", "venv"]).arg(&environment)) else { return Ok(python) };
        let _ = std::fs::remove_dir_all(&environment);
        match run(Command::new("python3").args(["-m", "pip", "--version"])) {
            Ok(_) => Ok("python3".into()),
            Err(_) => Err(format!(
                "{error}\nthe compiler is installed by Python 3 with its module venv or pip; {VARIABLE} may name a folder that has it"
            )),
        }
    }
}

fn parse(text: &str) -> Result<Vec<Wheel>, String> {
    let lines = text.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let wheel = |line: &str| {
        let (package, rest) = line.split_once("==")?;
        let (version, hashes) = rest.split_once(' ')?;
        hashes.starts_with("--hash=sha256:").then(|| Wheel {
            package: package.to_owned(),
            version: version.to_owned(),
            line: line.to_owned(),
        })
    };
    lines.map(|l| wheel(l).ok_or_else(|| format!("{LOCK}: not `package==version --hash=sha256:…`: {l}"))).collect()
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map(|n| n.parse().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_names_every_tool() {
        let toolchain = Toolchain::open(&tree::root(), None).unwrap();
        let version = |a| numbers(toolchain.assembler_version(a).unwrap());
        let [oldest, release, newest] = [Assembler::Oldest, Assembler::Release, Assembler::Newest].map(version);
        assert!(oldest < release && release < newest);
        assert_eq!(toolchain.compiler_version().unwrap(), "12.9.86");
        for package in ["nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12", "nvidia-cuda-nvdisasm"] {
            toolchain.wheel(package).unwrap();
        }
    }

    #[test]
    fn a_line_without_version_or_hash_is_refused() {
        assert!(parse("a==1 --hash=sha256:0\n# x\n\n").is_ok_and(|w| w.len() == 1));
        for line in ["a", "a==1", "a==1 --hash=md5:0", "a>=1 --hash=sha256:0"] {
            assert!(parse(line).unwrap_err().contains(line));
        }
    }
}
