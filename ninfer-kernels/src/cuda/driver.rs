//! The driver's functions as checked calls, and its objects as owned values.
//!
//! Every object holds its context, makes it current before a call that needs it, and is released when dropped. Only
//! functions that drivers for CUDA 12.0 have are called, since a missing one would end the process.

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;
use ninfer_core::{Error, Result};

/// Longest log that is read back from the compiler of the driver.
const LOG_BYTES: usize = 16 << 10;

/// Turns the result of a call into a typed error with the driver's words.
pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: writes one pointer to a valid address.
    let found = unsafe { sys::cuGetErrorString(code, &mut text) };
    let message = if found != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        "unknown code".to_owned()
    } else {
        // SAFETY: on success the pointer is to a string constant of the library, which stays loaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Driver { call, code: code as i32, message })
}

/// The primary context of a device.
pub(super) struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver locks internally.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a device. The driver library must have been found before.
    pub(super) fn retain(ordinal: u32) -> Result<Arc<Self>> {
        let mut device = 0;
        let mut handle = ptr::null_mut();
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: takes no pointer; the flags must be 0.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        // SAFETY: writes one integer to a valid address; the driver checks the ordinal.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
        // SAFETY: writes one handle to a valid address for a device that exists.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut handle, device) })?;
        let context = Arc::new(Self { device, handle });
        context.enter()?;
        Ok(context)
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the handle is retained for as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.handle) })
    }

    /// Free and total bytes of device memory.
    pub(super) fn memory(&self) -> Result<(u64, u64)> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes to valid addresses.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything submitted to the device.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: takes no argument; the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. An error at teardown has no one to go to.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Device memory.
pub(super) struct Memory {
    context: Arc<Context>,
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Memory {
    /// Allocates; the content is unspecified.
    pub(super) fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self> {
        context.enter()?;
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: writes one address to a valid place; the context is current.
            let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                let available = context.memory().map_or(0, |(free, _)| free);
                return Err(Error::OutOfMemory { what: what.to_owned(), requested: bytes as u64, available });
            }
            check("cuMemAlloc", code)?;
        }
        Ok(Self { context: context.clone(), address, bytes })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 && self.context.synchronize().is_ok() {
            // SAFETY: allocated by `new`, freed once, and no work that could use it is left.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} device bytes", self.bytes)
    }
}

/// Page-locked host memory that the device can address.
pub(super) struct Pinned {
    context: Arc<Context>,
    host: *mut u8,
    pub(super) device: u64,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates zeroed bytes.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.enter()?;
        let mut host = ptr::null_mut();
        let mut device = 0;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: writes one pointer to a valid place; the context is current.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) })?;
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, bytes) };
        let mut memory = Self { context: context.clone(), host: host.cast(), device: 0, bytes };
        // SAFETY: the pointer is a mapped host allocation.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        check("cuMemHostGetDevicePointer", code)?;
        memory.device = device;
        Ok(memory)
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    /// The bytes; no device work may be writing them.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were allocated and zeroed. The queue reads them only behind a synchronisation.
        unsafe { std::slice::from_raw_parts(self.host, self.bytes) }
    }

    /// The bytes; no device work may be reading or writing those that are touched.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.host, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.synchronize().is_ok() {
            // SAFETY: allocated by `new`, freed once, and no work that could use it is left.
            let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pinned bytes", self.bytes)
    }
}

/// A stream: work in order.
pub(super) struct Stream {
    pub(super) context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: a stream handle may be used from any thread; one queue owns it.
unsafe impl Send for Stream {}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) block: u32,
    /// Dynamic shared memory in bytes.
    pub(super) shared: u32,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut handle = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle to a valid address; the context is current.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Waits for everything submitted so far.
    pub(super) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Copies `len` bytes from pinned memory to the device.
    pub(super) fn upload(&self, to: u64, from: &Pinned, offset: usize, len: usize) -> Result<()> {
        debug_assert!(offset + len <= from.bytes);
        // SAFETY: the caller owns `len` bytes at `to`, and the source range lies inside the pinned allocation, which stays
        // unchanged until the queue has synchronised.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.host.add(offset).cast(), len, self.handle) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Copies `len` bytes from the device to pinned memory.
    pub(super) fn download(&self, to: &mut Pinned, offset: usize, from: u64, len: usize) -> Result<()> {
        debug_assert!(offset + len <= to.bytes);
        // SAFETY: the caller owns `len` bytes at `from`, and the target range lies inside the pinned allocation.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.host.add(offset).cast(), from, len, self.handle) };
        check("cuMemcpyDtoHAsync", code)
    }

    /// Copies the first bytes of one piece of device memory to another.
    pub(super) fn copy(&self, to: &Memory, from: &Memory, len: usize) -> Result<()> {
        debug_assert!(len <= to.bytes && len <= from.bytes);
        // SAFETY: both allocations have `len` bytes and are two.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to.address, from.address, len, self.handle) })
    }

    /// Sets bytes on the device.
    pub(super) fn fill(&self, at: u64, value: u8, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller owns `len` bytes at `at`.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, value, len, self.handle) })
    }

    /// Launches a kernel whose only parameter is a struct.
    ///
    /// # Safety
    /// `arguments` must be laid out as the kernel's parameter, and every address in it must be valid for what the kernel does
    /// with it until the stream has run the launch.
    pub(super) unsafe fn launch<A: Copy>(&self, function: &Function, how: &Launch, arguments: &A) -> Result<()> {
        if size_of::<A>() != function.parameter {
            return Err(Error::Shape {
                op: "launch",
                what: "bytes of the kernel's parameter",
                expected: function.parameter.to_string(),
                got: size_of::<A>().to_string(),
            });
        }
        let mut parameters = [ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: how.grid[0],
            gridDimY: how.grid[1],
            gridDimZ: how.grid[2],
            blockDimX: how.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: how.shared,
            hStream: self.handle,
            attrs: &mut overlap,
            numAttrs: u32::from(function.overlaps),
        };
        // SAFETY: the driver copies the parameter during the call; the rest is the caller's promise.
        let code = unsafe { sys::cuLaunchKernelEx(&config, function.handle, parameters.as_mut_ptr(), ptr::null_mut()) };
        check("cuLaunchKernelEx", code)
    }

    /// Starts to capture what is submitted, instead of running it.
    pub(super) fn begin_capture(&self) -> Result<()> {
        // Relaxed: the workspace may grow while a step is captured.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.handle, mode) })
    }

    /// Ends the capture and makes it executable.
    pub(super) fn end_capture(&self) -> Result<Graph> {
        let mut graph = ptr::null_mut();
        // SAFETY: writes one handle to a valid address.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.handle, &mut graph) })?;
        let mut nodes = 0;
        // SAFETY: with a null list the call only writes the count.
        let counted = check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes) });
        let mut handle = ptr::null_mut();
        // SAFETY: the graph was just captured.
        let made = check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, graph, 0) });
        // SAFETY: the graph is not used any more; the executable one is a copy.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        made?;
        let executable = Graph { context: self.context.clone(), handle, nodes };
        counted?;
        // SAFETY: both handles are alive.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(handle, self.handle) })?;
        Ok(executable)
    }

    /// Runs a captured step.
    pub(super) fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both handles are alive; the graph's owner keeps every buffer it touches.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.handle, self.handle) })
    }

    pub(super) fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.handle) })
    }

    /// As [`Stream::record`]; while the stream is captured, the event becomes a part of the step and happens in each replay.
    pub(super) fn record_in_step(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: both handles are alive; the owner of the step keeps the event.
        let code = unsafe { sys::cuEventRecordWithFlags(event.handle, self.handle, flags) };
        check("cuEventRecordWithFlags", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `new`, destroyed once; the driver finishes its work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

/// A point in a stream with its time.
pub(super) struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks internally.
unsafe impl Sync for Event {}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle to a valid address; the context is current.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Waits until the event has happened; at once if it was never recorded.
    pub(super) fn wait(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Milliseconds from an earlier event to this one; both must have happened.
    pub(super) fn since(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number to a valid address; both handles are alive.
        let code = unsafe { sys::cuEventElapsedTime(&mut milliseconds, start.handle, self.handle) };
        check("cuEventElapsedTime", code).map(|()| milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `new`, destroyed once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}

/// A step that can be run again and again.
pub(super) struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
    /// Kernels, copies and fills in it.
    pub(super) nodes: usize,
}

// SAFETY: a graph handle may be used from any thread, by one at a time.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({} nodes)", self.nodes)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: instantiated once, destroyed once; the driver finishes a launch that still runs first.
            let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
        }
    }
}

/// A kernel of a module that stays loaded.
#[derive(Clone, Copy)]
pub(super) struct Function {
    handle: sys::CUfunction,
    /// Registers of a thread.
    pub(super) registers: u32,
    /// Bytes of a thread's stack, spilled registers included.
    pub(super) local: u32,
    /// Static shared memory in bytes.
    pub(super) shared: u32,
    /// It waits for the kernel before by itself, so its blocks may start while that one still runs.
    pub(super) overlaps: bool,
    /// Bytes of its only parameter.
    pub(super) parameter: usize,
}

// SAFETY: a function handle may be used from any thread; its module is never unloaded before the functions are gone.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Lets a block use this much dynamic shared memory.
    pub(super) fn allow_shared(&self, bytes: u32) -> Result<()> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: the handle is alive; the driver checks the value.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(self.handle, attribute, bytes) })
    }

    /// Blocks of this size that an SM holds at once.
    pub(super) fn blocks_per_sm(&self, block: u32, shared: u32) -> Result<u32> {
        let mut blocks = 0;
        // SAFETY: writes one integer to a valid address; the handle is alive.
        let code = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.handle, block as i32, shared as usize)
        };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(u32::try_from(blocks).unwrap_or(0))
    }
}

/// A loaded module.
pub(super) struct Module {
    context: Arc<Context>,
    handle: sys::CUmodule,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device of the context.
    ///
    /// # Errors
    /// [`Error::Driver`] with the log of the driver's compiler.
    pub(super) fn load(context: &Arc<Context>, name: &str, ptx: &str) -> Result<Self> {
        context.enter()?;
        let text = CString::new(ptx).map_err(|_| Error::Corrupt { reason: format!("PTX of {name} holds a NUL") })?;
        let mut log = vec![0u8; LOG_BYTES];
        let mut options =
            [sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER, sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(LOG_BYTES)];
        let mut handle = ptr::null_mut();
        // SAFETY: the image ends with NUL, the two options have the values that the driver's documentation asks for, and the
        // log outlives the call.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &mut handle,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        check("cuModuleLoadDataEx", code).map_err(|error| match error {
            Error::Driver { call, code, message } => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
                let log = String::from_utf8_lossy(&log[..end]).trim().to_owned();
                Error::Driver { call, code, message: format!("{message} (module {name}) {log}").trim().to_owned() }
            }
            other => other,
        })?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Looks a kernel up.
    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let text = CString::new(name).map_err(|_| Error::Corrupt { reason: "a kernel name holds a NUL".to_owned() })?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle to a valid address; the name ends with NUL and the module is loaded.
        let code = unsafe { sys::cuModuleGetFunction(&mut handle, self.handle, text.as_ptr()) };
        check("cuModuleGetFunction", code).map_err(|error| match error {
            Error::Driver { call, code, message } => {
                Error::Driver { call, code, message: format!("{message} (kernel {name})") }
            }
            other => other,
        })?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer to a valid address; the function was just found.
            check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut value, which, handle) })
                .map(|()| u32::try_from(value).unwrap_or(0))
        };
        use sys::CUfunction_attribute as A;
        // All kernels divide the memory of a multiprocessor alike: it would have to be empty before it is divided otherwise,
        // and no kernel could begin beside another.
        let carveout = A::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the handle is alive; the driver checks the value.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(handle, carveout, 100) })?;
        Ok(Function {
            handle,
            registers: attribute(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local: attribute(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared: attribute(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            overlaps: false,
            parameter: 0,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: loaded once, unloaded once, together with the table of its functions.
            let _ = unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}
