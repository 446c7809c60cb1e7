//! The probe against functions that play a driver, and against the machine the tests run on.

use std::ffi::{c_char, c_int, c_uint};

use super::api::{Api, Attribute};
use super::*;
use crate::device::BandwidthSource;

/// # Safety
/// `out` is valid for a write of `T`, as for the functions of a driver.
unsafe fn put<T>(out: *mut T, value: T) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    0
}

/// # Safety
/// `out` is valid for writes of `len` bytes.
unsafe fn put_text(out: *mut c_char, len: c_int, text: &[u8]) -> c_int {
    for (i, &byte) in text.iter().take(len as usize).enumerate() {
        // SAFETY: `i` is below the length of the caller's buffer.
        unsafe { out.add(i).write(byte as c_char) };
    }
    0
}

unsafe extern "system" fn ok(_: c_uint) -> c_int {
    0
}
unsafe extern "system" fn no_device(_: c_uint) -> c_int {
    100
}
unsafe extern "system" fn stub(_: c_uint) -> c_int {
    34
}
unsafe extern "system" fn unknown(_: c_uint) -> c_int {
    999
}
unsafe extern "system" fn version(out: *mut c_int) -> c_int {
    // SAFETY: called like a driver's function.
    unsafe { put(out, 12080) }
}
unsafe extern "system" fn count(out: *mut c_int) -> c_int {
    // SAFETY: called like a driver's function.
    unsafe { put(out, 2) }
}
unsafe extern "system" fn negative_count(out: *mut c_int) -> c_int {
    // SAFETY: called like a driver's function.
    unsafe { put(out, -3) }
}
unsafe extern "system" fn get(out: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: called like a driver's function.
    unsafe { put(out, ordinal) }
}
unsafe extern "system" fn name(out: *mut c_char, len: c_int, device: c_int) -> c_int {
    let text: &[u8] = if device == 0 { b"NVIDIA GeForce RTX 5090" } else { &[b'x'; 300] };
    // SAFETY: called like a driver's function.
    unsafe { put_text(out, len, text) }
}
unsafe extern "system" fn pci(out: *mut c_char, len: c_int, device: c_int) -> c_int {
    let text: &[u8] = if device == 0 { b"0000:0A:00.0" } else { b"\xff\xfe" };
    // SAFETY: called like a driver's function.
    unsafe { put_text(out, len, text) }
}
unsafe extern "system" fn attribute(out: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    const SM_COUNT: c_int = Attribute::SmCount as c_int;
    let value = match (attribute, device) {
        (SM_COUNT, 0) => 170,
        (SM_COUNT, _) => 20,
        (18, _) => 0,
        (36, _) => 1_000_000,
        (37, _) => 128,
        (38, _) => 96 << 20,
        (39, _) => 1536,
        (75, _) => 12,
        (76, _) => 0,
        (81, _) => 100 << 10,
        (82, _) => 65_536,
        (95, _) => device,
        (97, _) => 99 << 10,
        _ => return 1,
    };
    // SAFETY: called like a driver's function.
    unsafe { put(out, value) }
}
unsafe extern "system" fn refuse(_: *mut c_int, _: c_int, _: c_int) -> c_int {
    801
}
unsafe extern "system" fn total(out: *mut usize, _: c_int) -> c_int {
    // SAFETY: called like a driver's function.
    unsafe { put(out, 32 << 30) }
}
unsafe extern "system" fn uuid(out: *mut [u8; 16], device: c_int) -> c_int {
    if device == 1 {
        return 801;
    }
    // SAFETY: called like a driver's function.
    unsafe { put(out, std::array::from_fn(|i| i as u8 * 17)) }
}
unsafe extern "system" fn describe_code(code: c_int, out: *mut *const c_char) -> c_int {
    if code == 999 {
        // SAFETY: called like a driver's function.
        return unsafe { put(out, c"unknown error".as_ptr()) };
    }
    1
}

const FAKE: Api = Api {
    init: ok,
    driver_version: version,
    device_count: count,
    device_get: get,
    device_name: name,
    device_attribute: attribute,
    device_total_mem: total,
    device_uuid: uuid,
    device_pci: pci,
    error_string: describe_code,
};

#[test]
fn every_fact_is_queried() {
    let devices = FAKE.devices().unwrap();
    let d = &devices[0];
    assert_eq!(d.name, "NVIDIA GeForce RTX 5090");
    assert_eq!(d.uuid.as_deref(), Some("GPU-00112233-4455-6677-8899-aabbccddeeff"));
    assert_eq!(d.pci.as_deref(), Some("0000:0a:00.0"));
    assert_eq!((d.capability, d.sm_count), (Some(Capability::new(12, 0)), 170));
    assert_eq!((d.threads_per_sm, d.registers_per_sm), (1536, 65_536));
    assert_eq!((d.shared_per_sm, d.shared_per_block_optin), (100 << 10, 99 << 10));
    assert_eq!((d.l2_bytes, d.integrated, d.cooperative_launch), (96 << 20, false, false));
    assert_eq!((d.total_memory, d.usable_memory), (Some(32 << 30), Some(32 << 30)));
    assert_eq!(d.driver, Some(CudaVersion::new(12, 8)));
    assert_eq!(d.bandwidth, Some(Bandwidth::nominal(1792e9)));
}

#[test]
fn an_unknown_part_gets_its_bandwidth_from_clock_and_bus() {
    let d = &FAKE.devices().unwrap()[1];
    assert_eq!(d.bandwidth.map(|b| (b.bytes_per_second, b.source)), Some((32e9, BandwidthSource::Nominal)));
    assert_eq!(d.name.len(), 256, "a name without an end is cut at the buffer's");
    assert_eq!(d.uuid, None);
    assert!(d.cooperative_launch);
}

#[test]
fn refusals_are_typed() {
    let start = |init| Api { init, ..FAKE }.start();
    assert_eq!(start(no_device), Ok(DriverInfo { version: CudaVersion::new(12, 8), devices: 0 }));
    assert_eq!(Api { init: no_device, ..FAKE }.devices(), Ok(vec![]));
    assert!(matches!(start(stub), Err(Error::NoDriver { .. })));
    let unknown_error = Error::Driver { call: "cuInit", code: 999, message: "unknown error".into() };
    assert_eq!(start(unknown), Err(unknown_error));
    let refused = Api { device_attribute: refuse, ..FAKE }.devices();
    let message = "unknown code".to_owned();
    assert_eq!(refused, Err(Error::Driver { call: "cuDeviceGetAttribute", code: 801, message }));
    assert_eq!(Api { device_count: negative_count, ..FAKE }.devices(), Ok(vec![]));
}

#[test]
fn a_missing_library_names_what_was_tried() {
    let Err(Error::NoDriver { reason }) = Api::open(&["libninfer-absent-a.so", "libninfer-absent-b.so"]) else {
        panic!("a library of that name exists");
    };
    assert!(reason.contains("absent-a") && reason.contains("absent-b"), "{reason}");
    assert_eq!(Api::open(&[]).unwrap_err(), Error::NoDriver { reason: String::new() });
}

#[cfg(target_os = "linux")]
#[test]
fn a_library_that_is_no_driver_is_refused() {
    let Err(Error::NoDriver { reason }) = Api::open(&["libc.so.6"]) else { panic!("the C library is no driver") };
    assert!(reason.contains("cuInit"), "{reason}");
}

#[test]
fn this_machine_gives_devices_or_no_driver() {
    match devices() {
        Err(Error::NoDriver { reason }) => {
            println!("no driver here: {reason}");
            assert!(!reason.is_empty());
            assert_eq!(probe(), Err(Error::NoDriver { reason }));
        }
        Err(error) => panic!("{error}"),
        Ok(list) => {
            assert_eq!(probe().map(|p| p.devices as usize), Ok(list.len()));
            for d in list {
                println!("{d}\n{d:#?}");
                assert!(d.sm_count > 0 && d.total_memory > Some(0) && d.registers_per_sm > 0 && d.l2_bytes > 0);
                assert!(d.shared_per_sm >= d.shared_per_block_optin && d.uuid.is_some() && d.pci.is_some());
            }
        }
    }
}
