"""What the phases torch and pair run with a host's PyTorch, on the host itself
and in pods.

  pytorch.py describe           prints what a pod must have to run this Python
  pytorch.py matmul DIRECTORY   serves measurements of a matrix product
  pytorch.py allreduce DIRECTORY GPUS
                                serves measurements of an all-reduce over so many
                                GPUs, with a process for each

A server reads one request a line from DIRECTORY/in and writes one answer a line
to DIRECTORY/out, both named pipes, so that only the first answer waits for
Python and CUDA to start. Requests:

  info               the GPUs that PyTorch sees
  measure START S    TFLOP/s, or GB/s of bus bandwidth, over S seconds that begin
                     at START, in seconds since 1970; 0 means at once
"""

import ctypes
import os
import sys
import time

# NVLink multicast stays off: where NVSwitches are shared, a program that uses it
# can put the GPUs of other tenants out of service.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
# GPUs are counted in NVML's order.
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
# All ranks are processes of one network namespace.
os.environ["NCCL_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed

SIZE = 8192  # of a square matrix
BYTES = 1 << 30  # that are reduced


class Library(ctypes.Structure):
    """The beginning of struct dl_phdr_info."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def libraries():
    """Names under which this process's libraries were loaded."""
    names = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Library), ctypes.c_size_t, ctypes.c_void_p)
    def see(library, size, data):
        names.append((library.contents.name or b"").decode())
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(see, None)
    return [name for name in names if name.startswith("/")]


def of_driver(library):
    """Whether a library belongs to the NVIDIA driver: a pod has it from its claim."""
    return os.path.basename(library).startswith(("libcuda.so", "libnvidia-", "libnvcu"))


def describe():
    """Print the interpreter, its directories, and its libraries elsewhere."""
    measure = Matmul()
    measure(0, 0.01)  # loads what CUDA loads only when it is needed
    directories = [p for p in sys.path[1:] if os.path.isdir(p)]
    if sys.prefix != sys.base_prefix:
        directories.append(sys.prefix)
    top = []
    for directory in sorted({os.path.abspath(d) for d in directories}):
        if not any(directory.startswith(t + "/") for t in top):
            top.append(directory)
    print("python", sys.executable, os.path.realpath(sys.executable))
    print("version", torch.__version__, ".".join(map(str, torch.cuda.nccl.version())))
    for directory in top:
        print("directory", directory)
    for library in sorted(set(libraries())):
        if not of_driver(library) and not any(library.startswith(t + "/") for t in top):
            print("library", library)


class Matmul:
    """A bf16 matrix product on the first GPU."""

    def __init__(self):
        torch.cuda.set_device(0)
        self.a, self.b, self.c = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        self.run(50)

    def run(self, count):
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)
        torch.cuda.synchronize()

    def __call__(self, start, seconds):
        time.sleep(max(0, start - time.time()))
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            self.run(20)
            done += 20
        return 2 * SIZE**3 * done / (time.perf_counter() - begin) / 1e12


class AllReduce:
    """An all-reduce; each process of the group makes one, with its rank."""

    def __init__(self, rank, ranks, store):
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group(
            "nccl", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
        )
        self.ranks = ranks
        self.x = torch.full((BYTES // 4,), rank + 1.0, device="cuda")
        torch.distributed.all_reduce(self.x)
        want = ranks * (ranks + 1) / 2
        if not bool((self.x == want).all()):
            raise RuntimeError(f"the sum of 1 to {ranks} is {self.x[0].item()}, not {want}")
        self.run(5)

    def run(self, count):
        for _ in range(count):
            torch.distributed.all_reduce(self.x, op=torch.distributed.ReduceOp.MAX)
        torch.cuda.synchronize()

    def __call__(self, count):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.run(count)
        return 2 * (self.ranks - 1) / self.ranks * BYTES * count / (time.perf_counter() - begin) / 1e9


class Group:
    """AllReduce in a process for each GPU; this one has rank 0."""

    COUNT = 100  # all-reduces in one measurement

    def __init__(self, directory, ranks):
        store = os.path.join(directory, "store")
        self.pipes = []
        for rank in range(1, ranks):
            reader, writer = os.pipe()
            if os.fork() == 0:
                for other in [writer, *self.pipes]:
                    os.close(other)
                follow(reader, AllReduce(rank, ranks, store))
            os.close(reader)
            self.pipes.append(writer)
        self.measure = AllReduce(0, ranks, store)

    def __call__(self, start, seconds):
        for pipe in self.pipes:
            os.write(pipe, b".")
        return self.measure(self.COUNT)


def follow(reader, measure):
    """Measure whenever rank 0 does, and end with it."""
    while os.read(reader, 1):
        measure(Group.COUNT)
    os._exit(0)


def answer(measure, request):
    words = request.split()
    if words[0] == "info":
        seen = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{p.name} ({p.multi_processor_count} SMs)" for p in seen)
    return f"{measure(float(words[1]), float(words[2])):.2f}"


def serve(directory, measure):
    while True:
        with open(os.path.join(directory, "in")) as pipe:
            requests = pipe.read().splitlines()
        for request in requests:
            try:
                said = answer(measure, request)
            except Exception as e:
                said = "error: " + " ".join(str(e).split())
            with open(os.path.join(directory, "out"), "w") as pipe:
                pipe.write(said + "\n")


def main():
    match sys.argv[1:]:
        case ["describe"]:
            describe()
        case ["matmul", directory]:
            serve(directory, Matmul())
        case ["allreduce", directory, gpus]:
            serve(directory, Group(directory, int(gpus)))
        case _:
            sys.exit(__doc__)


main()
