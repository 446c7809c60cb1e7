//! NVRTC, the compiler that needs neither a device nor a host compiler.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr::{null, null_mut};

use libloading::Library;

/// Options of every compilation, beside the target and the folders of headers.
///
/// Products and sums are contracted only where a kernel says `fmaf`, or two kernels could not agree bit for bit.
pub const OPTIONS: [&str; 3] = ["-std=c++17", "--fmad=false", "-default-device"];

/// `nvrtcProgram`.
type Program = *mut std::ffi::c_void;
type Status = c_int;
type Query<T> = unsafe extern "C" fn(Program, *mut T) -> Status;

/// The loaded library.
#[derive(Debug)]
pub struct Compiler {
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: Query<usize>,
    log: Query<c_char>,
    ptx_size: Query<usize>,
    ptx: Query<c_char>,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    message: unsafe extern "C" fn(Status) -> *const c_char,
    /// Keeps the functions above in memory.
    _library: Library,
}

/// A compiled source.
#[derive(Debug)]
pub struct Compiled {
    /// The PTX as the compiler wrote it.
    pub ptx: String,
    /// What the compiler said; warnings, if anything.
    pub log: String,
}

impl Compiler {
    /// Loads the library from a file.
    pub fn load(file: &Path) -> Result<Self, String> {
        let fail = |e: libloading::Error| format!("{}: {e}", file.display());
        // SAFETY: the file is NVIDIA's library, whose initialisers ask nothing of the caller.
        let library = unsafe { Library::new(file) }.map_err(fail)?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type of the field is that of the function in nvrtc.h.
                *unsafe { library.get($name) }.map_err(fail)?
            };
        }
        Ok(Self {
            create: symbol!(c"nvrtcCreateProgram"),
            compile: symbol!(c"nvrtcCompileProgram"),
            log_size: symbol!(c"nvrtcGetProgramLogSize"),
            log: symbol!(c"nvrtcGetProgramLog"),
            ptx_size: symbol!(c"nvrtcGetPTXSize"),
            ptx: symbol!(c"nvrtcGetPTX"),
            destroy: symbol!(c"nvrtcDestroyProgram"),
            message: symbol!(c"nvrtcGetErrorString"),
            _library: library,
        })
    }

    /// Compiles a source; `name` is what messages call it. The error holds the compiler's messages with file and line.
    pub fn compile(&self, name: &str, source: &str, options: &[String]) -> Result<Compiled, String> {
        let c = |text: &str| CString::new(text).map_err(|_| format!("{name}: a zero byte in {text:?}"));
        let (source, c_name) = (c(source)?, c(name)?);
        let options = options.iter().map(|o| c(o)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).map_err(|_| format!("{name}: too many options"))?;

        let mut program = null_mut();
        // SAFETY: source and name end with zero and outlive the call; there are no headers in memory.
        let status = unsafe { (self.create)(&mut program, source.as_ptr(), c_name.as_ptr(), 0, null(), null()) };
        self.check(name, status)?;
        // SAFETY: the program was just created; `pointers` are `count` texts that end with zero and outlive the call.
        let status = unsafe { (self.compile)(program, count, pointers.as_ptr()) };
        let log = self.text(name, program, self.log_size, self.log);
        let ptx = if status == 0 { self.text(name, program, self.ptx_size, self.ptx) } else { Ok(String::new()) };
        // SAFETY: the program was created above and is not used below.
        unsafe { (self.destroy)(&mut program) };
        let log = log?.trim().to_owned();
        match self.check(name, status) {
            Ok(()) => Ok(Compiled { ptx: ptx?, log }),
            Err(error) => Err(format!("{error}\n{log}")),
        }
    }

    fn check(&self, name: &str, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a static text for every number.
        let message = unsafe { CStr::from_ptr((self.message)(status)) };
        Err(format!("{name}: {}", message.to_string_lossy()))
    }

    fn text(&self, name: &str, program: Program, size: Query<usize>, get: Query<c_char>) -> Result<String, String> {
        let mut length = 0;
        // SAFETY: the program is alive and `length` is where the size goes.
        self.check(name, unsafe { size(program, &mut length) })?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the program is alive and the buffer has the size it asked for, with the final zero.
        self.check(name, unsafe { get(program, bytes.as_mut_ptr().cast()) })?;
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        String::from_utf8(bytes).map_err(|e| format!("{name}: {e}"))
    }
}
