"""A compiled BPF program, loaded and run by libbpf (through ctypes).

plugins/switch_offload/Makefile compiles the program; the object file is part of the package. If
libbpf or a permission is missing, or the object file is not the one that was built from the C file
beside it, BpfError is raised. The program and its maps are held by descriptors of this process, so
they are removed when the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np

from roadtrain.errors import RoadtrainError

READ = 256  # most elements of a table that are read at once
MAP_ARRAY = 2  # BPF_MAP_TYPE_ARRAY
INNER_MAP = 1 << 12  # BPF_F_INNER_MAP: allows tables of different sizes in a map of maps
ATTACH_XDP = 37  # BPF_XDP
LIVE_FRAMES = 1 << 1  # BPF_F_TEST_XDP_LIVE_FRAMES: verdicts are carried out
NATIVE, GENERIC = 1 << 2, 1 << 1  # XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE


class BpfError(RoadtrainError):
    """Raised if the BPF program cannot be used on this host. The message is one line with the
    reason."""


class _MapOptions(ctypes.Structure):
    """A copy of libbpf's struct bpf_map_create_opts."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("btf_fd", ctypes.c_uint32),
        ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
        ("btf_vmlinux_value_type_id", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("map_extra", ctypes.c_uint64),
        ("numa_node", ctypes.c_uint32),
        ("map_ifindex", ctypes.c_uint32),
    ]


class _RunOptions(ctypes.Structure):
    """A copy of libbpf's struct bpf_test_run_opts."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_void_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_void_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    ]


class _Arrival(ctypes.Structure):
    """A copy of the kernel's struct xdp_md: the device and the queue at which a packet arrived."""

    _fields_ = [
        ("data", ctypes.c_uint32),
        ("data_end", ctypes.c_uint32),
        ("data_meta", ctypes.c_uint32),
        ("ingress_ifindex", ctypes.c_uint32),
        ("rx_queue_index", ctypes.c_uint32),
        ("egress_ifindex", ctypes.c_uint32),
    ]


class _LinkOptions(ctypes.Structure):
    """A copy of libbpf's struct bpf_link_create_opts, with only the fields for XDP."""

    _fields_ = [
        ("sz", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("iter_info", ctypes.c_void_p),
        ("iter_info_len", ctypes.c_uint32),
        ("target_btf_id", ctypes.c_uint32),
        ("unused", ctypes.c_uint64 * 5),
    ]


def _libbpf() -> ctypes.CDLL:
    if sys.byteorder != "little":
        raise BpfError(
            "the BPF program needs a little-endian machine, but this machine is big-endian"
        )
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise BpfError("libbpf.so.1 is not installed") from None
    lib.libbpf_set_print(None)  # otherwise libbpf prints to stderr
    pointers = ("open_file", "find_map_by_name", "find_program_by_name")
    for name in pointers:
        getattr(lib, f"bpf_object__{name}").restype = ctypes.c_void_p
    return lib


def _check_built(file: Path) -> None:
    """Raise BpfError unless the object file and its C file are those of the last build, which wrote
    their SHA-256 into a file beside them."""
    files = file.with_suffix(".c"), file
    try:
        here = [f"{sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in files]
        built = file.with_suffix(".sha256").read_text().splitlines()[1:]  # after the compiler
    except OSError as error:
        raise BpfError(f"cannot read {error.filename}: {error.strerror}") from None
    if here != built:
        raise BpfError(f"{file.name} is not built from this {files[0].name}; run `make bpf`")


def _insist(result: int, doing: str) -> int:
    """Return the result of a libbpf call. Raises BpfError if the result is an error. `doing` names
    the failed action in the message."""
    if result < 0:
        raise BpfError(f"the kernel refused to {doing}: {os.strerror(-result)}")
    return result


class BpfObject:
    """The programs of an object file, loaded into the kernel, and their maps. Raises BpfError if
    loading fails."""

    def __init__(self, file: Path) -> None:
        self._lib = _libbpf()
        _check_built(file)
        opened = self._lib.bpf_object__open_file(os.fsencode(file), None)
        if not opened:
            raise BpfError(f"libbpf cannot read {file.name}")
        self._object = ctypes.c_void_p(opened)
        try:
            _insist(self._lib.bpf_object__load(self._object), f"load {file.name}")
        except BpfError:
            self.close()
            raise

    def close(self) -> None:
        """Release the programs and maps. Call this method once. An attached program stays attached
        until the descriptor that `attach` has returned is closed."""
        self._lib.bpf_object__close(self._object)

    def program(self, name: str) -> int:
        """Return the descriptor of the program `name`."""
        found = self._lib.bpf_object__find_program_by_name(self._object, name.encode())
        assert found, name
        return int(self._lib.bpf_program__fd(ctypes.c_void_p(found)))

    def map(self, name: str) -> int:
        """Return the descriptor of the map `name`."""
        return int(self._lib.bpf_map__fd(self._map(name)))

    def _map(self, name: str) -> ctypes.c_void_p:
        found = self._lib.bpf_object__find_map_by_name(self._object, name.encode())
        assert found, name
        return ctypes.c_void_p(found)

    def array_like(self, pattern: str, value_nbytes: int, entries: int) -> int:
        """Make a new array map with `entries` values of `value_nbytes` each, like the map
        `pattern`. Returns the map's descriptor, which the caller closes."""
        like = self._map(pattern)
        options = _MapOptions(
            sz=ctypes.sizeof(_MapOptions),
            btf_fd=self._lib.bpf_object__btf_fd(self._object),
            btf_key_type_id=self._lib.bpf_map__btf_key_type_id(like),
            btf_value_type_id=self._lib.bpf_map__btf_value_type_id(like),
            map_flags=INNER_MAP,
        )
        made = self._lib.bpf_map_create(
            MAP_ARRAY, b"table", 4, value_nbytes, entries, ctypes.byref(options)
        )
        return _insist(made, f"make a table of {entries} x {value_nbytes} bytes")

    def update(self, name: str, key: int, value: bytes) -> None:
        number = ctypes.c_uint32(key)
        done = self._lib.bpf_map_update_elem(
            self.map(name), ctypes.byref(number), value, ctypes.c_uint64(0)
        )
        _insist(done, f"set an element of map {name}")

    def delete(self, name: str, key: int) -> None:
        """Delete the element `key` of the map `name` if it exists."""
        number = ctypes.c_uint32(key)
        self._lib.bpf_map_delete_elem(self.map(name), ctypes.byref(number))

    def mapped(self, name: str, dtype: np.dtype, entries: int) -> np.ndarray:
        """Return the values of the array map `name` as an array [entries]. The array shares the
        memory of the kernel's map, so writes to the array change the map."""
        memory = mmap.mmap(self.map(name), entries * dtype.itemsize)
        return np.frombuffer(memory, dtype, entries)

    def elements(self, table: int, dtype: np.dtype, entries: int) -> Iterator[np.ndarray]:
        """Yield the values of the array map with descriptor `table`, as arrays of at most 256
        values. The memory of a yielded array is reused for the next array."""
        values, keys = np.zeros(READ, dtype), np.zeros(READ, np.uint32)
        at = ctypes.c_uint32()
        begun, left = False, entries
        while left:
            count = ctypes.c_uint32(min(READ, left))
            done = self._lib.bpf_map_lookup_batch(
                table,
                ctypes.byref(at) if begun else None,
                ctypes.byref(at),
                keys.ctypes.data_as(ctypes.c_void_p),
                values.ctypes.data_as(ctypes.c_void_p),
                ctypes.byref(count),
                None,
            )
            begun = True
            if done != -errno.ENOENT:  # ENOENT marks the last batch
                _insist(done, "read a table")
            left -= count.value
            yield values[: count.value]

    def prepared(self, program: int, packet: np.ndarray) -> Callable[[], tuple[int, int]]:
        """Return a function that runs the program on `packet` (uint8) and modifies `packet` in
        place. The function returns the program's return value and its duration in ns."""
        options = _RunOptions(
            sz=ctypes.sizeof(_RunOptions),
            data_in=packet.ctypes.data,
            data_out=packet.ctypes.data,
            data_size_in=packet.size,
            repeat=1,
        )
        at, call, nbytes = ctypes.byref(options), self._lib.bpf_prog_test_run_opts, packet.size

        def run() -> tuple[int, int]:
            options.data_size_out = nbytes
            _insist(call(program, at), "test a program")
            return options.retval, options.duration

        return run

    def run(self, program: int, packet: np.ndarray) -> tuple[int, int]:
        """Run the program once on `packet`, which the program modifies in place. Returns the
        program's return value and its duration in ns."""
        return self.prepared(program, packet)()

    def run_live(self, program: int, packet: np.ndarray, interface: int, repeat: int) -> None:
        """Run the program as if `repeat` copies of `packet` had arrived at the interface. The
        program may send packets."""
        arrival = _Arrival(data_end=packet.size, ingress_ifindex=interface)
        options = _RunOptions(
            sz=ctypes.sizeof(_RunOptions),
            data_in=packet.ctypes.data,
            data_size_in=packet.size,
            ctx_in=ctypes.addressof(arrival),
            ctx_size_in=ctypes.sizeof(arrival),
            repeat=repeat,
            flags=LIVE_FRAMES,
        )
        done = self._lib.bpf_prog_test_run_opts(program, ctypes.byref(options))
        _insist(done, "send test packets")

    def attach(self, program: int, interface: int, flags: int) -> int:
        """Attach the program to the interface. Returns a descriptor. The program is detached when
        this descriptor is closed, or when the process ends."""
        options = _LinkOptions(sz=_LinkOptions.unused.offset, flags=flags)
        made = self._lib.bpf_link_create(program, interface, ATTACH_XDP, ctypes.byref(options))
        return _insist(made, "attach a program to the device")
