//! The functions of the driver library that the probe calls, and nothing else of it.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;

use libloading::Library;

use crate::{Error, Result};

/// File names of the driver library.
#[cfg(windows)]
const LIBRARY: [&str; 1] = ["nvcuda.dll"];
/// File names of the driver library; the second is a development link that may be all there is.
#[cfg(not(windows))]
const LIBRARY: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The library was made for linking only.
pub(super) const STUB_LIBRARY: c_int = 34;
/// No device is visible.
pub(super) const NO_DEVICE: c_int = 100;

/// Device attributes by the number the driver's interface gives them.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Attribute {
    SmCount = 16,
    Integrated = 18,
    MemoryClockKhz = 36,
    MemoryBusBits = 37,
    L2Bytes = 38,
    ThreadsPerSm = 39,
    CapabilityMajor = 75,
    CapabilityMinor = 76,
    SharedPerSm = 81,
    RegistersPerSm = 82,
    CooperativeLaunch = 95,
    SharedPerBlockOptin = 97,
}

/// A device handle; an integer that the driver checks.
pub(super) type Device = c_int;

/// Addresses of the functions; each has the signature that the driver's documentation gives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Api {
    pub(super) init: unsafe extern "system" fn(c_uint) -> c_int,
    pub(super) driver_version: unsafe extern "system" fn(*mut c_int) -> c_int,
    pub(super) device_count: unsafe extern "system" fn(*mut c_int) -> c_int,
    pub(super) device_get: unsafe extern "system" fn(*mut Device, c_int) -> c_int,
    pub(super) device_name: unsafe extern "system" fn(*mut c_char, c_int, Device) -> c_int,
    pub(super) device_attribute: unsafe extern "system" fn(*mut c_int, c_int, Device) -> c_int,
    pub(super) device_total_mem: unsafe extern "system" fn(*mut usize, Device) -> c_int,
    pub(super) device_uuid: unsafe extern "system" fn(*mut [u8; 16], Device) -> c_int,
    pub(super) device_pci: unsafe extern "system" fn(*mut c_char, c_int, Device) -> c_int,
    pub(super) error_string: unsafe extern "system" fn(c_int, *mut *const c_char) -> c_int,
}

impl Api {
    /// The driver of this machine, opened once; it stays open until the process ends.
    pub(super) fn get() -> Result<Self> {
        static API: OnceLock<Result<Api>> = OnceLock::new();
        API.get_or_init(|| Self::open(&LIBRARY)).clone()
    }

    /// Opens the first library that can be opened and looks up every function.
    pub(super) fn open(names: &[&str]) -> Result<Self> {
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: opening a library runs its initialisers. The driver's are made to run in any process, and the name is
            // a bare file name that the system's search path decides on, as for every program that uses the driver.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Self::resolve(library, name),
                Err(error) => {
                    let cause =
                        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                    reasons.push(if cause.contains(name) { cause } else { format!("{name}: {cause}") });
                }
            }
        }
        Err(Error::NoDriver { reason: reasons.join("; ") })
    }

    fn resolve(library: Library, name: &str) -> Result<Self> {
        macro_rules! function {
            ($symbol:literal) => {{
                // SAFETY: the symbol has the signature of the field it is assigned to: both are those of the driver's
                // documentation, which never changes a symbol's signature (changed functions get a suffix).
                let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                *found.map_err(|_| Error::NoDriver { reason: format!("{name} has no function {}", $symbol) })?
            }};
        }
        let api = Self {
            init: function!("cuInit"),
            driver_version: function!("cuDriverGetVersion"),
            device_count: function!("cuDeviceGetCount"),
            device_get: function!("cuDeviceGet"),
            device_name: function!("cuDeviceGetName"),
            device_attribute: function!("cuDeviceGetAttribute"),
            device_total_mem: function!("cuDeviceTotalMem_v2"),
            device_uuid: function!("cuDeviceGetUuid"),
            device_pci: function!("cuDeviceGetPCIBusId"),
            error_string: function!("cuGetErrorString"),
        };
        // The addresses must stay valid for as long as the process runs, and drivers are not made to be unloaded.
        std::mem::forget(library);
        Ok(api)
    }

    pub(super) fn init(&self) -> c_int {
        // SAFETY: takes no pointer; the flags must be 0. May be called any number of times from any thread.
        unsafe { (self.init)(0) }
    }

    pub(super) fn driver_version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: writes one integer to a valid address.
        let code = unsafe { (self.driver_version)(&mut version) };
        self.check("cuDriverGetVersion", code).map(|()| version)
    }

    pub(super) fn device_count(&self) -> Result<c_int> {
        let mut count = 0;
        // SAFETY: writes one integer to a valid address.
        let code = unsafe { (self.device_count)(&mut count) };
        self.check("cuDeviceGetCount", code).map(|()| count)
    }

    pub(super) fn device(&self, ordinal: c_int) -> Result<Device> {
        let mut device = 0;
        // SAFETY: writes one integer to a valid address; the driver checks the ordinal.
        let code = unsafe { (self.device_get)(&mut device, ordinal) };
        self.check("cuDeviceGet", code).map(|()| device)
    }

    pub(super) fn attribute(&self, device: Device, attribute: Attribute) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: writes one integer to a valid address; the driver checks attribute and device.
        let code = unsafe { (self.device_attribute)(&mut value, attribute as c_int, device) };
        self.check("cuDeviceGetAttribute", code).map(|()| value)
    }

    pub(super) fn total_memory(&self, device: Device) -> Result<u64> {
        let mut bytes = 0usize;
        // SAFETY: writes one size to a valid address; the driver checks the device.
        let code = unsafe { (self.device_total_mem)(&mut bytes, device) };
        self.check("cuDeviceTotalMem", code).map(|()| bytes as u64)
    }

    pub(super) fn uuid(&self, device: Device) -> Result<[u8; 16]> {
        let mut bytes = [0; 16];
        // SAFETY: writes 16 bytes to a valid address; the driver checks the device.
        let code = unsafe { (self.device_uuid)(&mut bytes, device) };
        self.check("cuDeviceGetUuid", code).map(|()| bytes)
    }

    pub(super) fn name(&self, device: Device) -> Result<String> {
        self.text("cuDeviceGetName", self.device_name, device)
    }

    pub(super) fn pci_address(&self, device: Device) -> Result<String> {
        self.text("cuDeviceGetPCIBusId", self.device_pci, device).map(|s| s.to_ascii_lowercase())
    }

    fn text(
        &self,
        call: &'static str,
        function: unsafe extern "system" fn(*mut c_char, c_int, Device) -> c_int,
        device: Device,
    ) -> Result<String> {
        let mut buffer = [0u8; 256];
        // SAFETY: the length passed is that of the buffer, and the function writes no further; it checks the device.
        let code = unsafe { function(buffer.as_mut_ptr().cast(), buffer.len() as c_int, device) };
        self.check(call, code)?;
        // A text that fills the buffer may lack its end.
        let end = buffer.iter().position(|&b| b == 0).unwrap_or(buffer.len());
        Ok(String::from_utf8_lossy(&buffer[..end]).trim().to_owned())
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// The error of a call, with the driver's description of the code.
    pub(super) fn error(&self, call: &'static str, code: c_int) -> Error {
        let mut text = std::ptr::null();
        // SAFETY: writes one pointer to a valid address.
        let found = unsafe { (self.error_string)(code, &mut text) };
        let message = if found != 0 || text.is_null() {
            "unknown code".to_owned()
        } else {
            // SAFETY: on success the pointer is to a string constant of the library, which stays loaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Error::Driver { call, code, message }
    }
}
