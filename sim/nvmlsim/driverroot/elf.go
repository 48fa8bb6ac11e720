package driverroot

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
)

// emptyLibrary is a valid shared object with this soname and no symbols, for
// the machine this program runs on: ldconfig accepts it and it can be loaded.
func emptyLibrary(soname string) []byte {
	const (
		ehdr, phdr, dyn, sym = 64, 56, 16, 24
		dynOff               = ehdr + 3*phdr
		entries              = 7
		hashOff              = dynOff + entries*dyn
		symOff               = hashOff + 16
		strOff               = symOff + sym
	)
	strtab := append([]byte{0}, append([]byte(soname), 0)...)
	size := uint64(strOff + len(strtab))
	machine := elf.EM_X86_64
	if runtime.GOARCH == "arm64" {
		machine = elf.EM_AARCH64
	}
	header := elf.Header64{
		Type: uint16(elf.ET_DYN), Machine: uint16(machine), Version: 1, Phoff: ehdr,
		Ehsize: ehdr, Phentsize: phdr, Phnum: 3,
	}
	copy(header.Ident[:], "\x7fELF\x02\x01\x01")
	const page = 0x10000
	parts := []any{
		header,
		elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_W), Filesz: size, Memsz: size, Align: page},
		elf.Prog64{Type: uint32(elf.PT_DYNAMIC), Flags: uint32(elf.PF_R | elf.PF_W), Off: dynOff, Vaddr: dynOff, Paddr: dynOff, Filesz: entries * dyn, Memsz: entries * dyn, Align: 8},
		elf.Prog64{Type: uint32(elf.PT_GNU_STACK), Flags: uint32(elf.PF_R | elf.PF_W), Align: 16},
		[entries]elf.Dyn64{
			{Tag: int64(elf.DT_SONAME), Val: 1},
			{Tag: int64(elf.DT_HASH), Val: hashOff},
			{Tag: int64(elf.DT_SYMTAB), Val: symOff},
			{Tag: int64(elf.DT_SYMENT), Val: sym},
			{Tag: int64(elf.DT_STRTAB), Val: strOff},
			{Tag: int64(elf.DT_STRSZ), Val: uint64(len(strtab))},
			{Tag: int64(elf.DT_NULL)},
		},
		[4]uint32{1, 1, 0, 0}, // hash: one bucket, one chain, both empty
		elf.Sym64{},
		strtab,
	}
	var b bytes.Buffer
	for _, p := range parts {
		_ = binary.Write(&b, binary.LittleEndian, p) // a bytes.Buffer takes all
	}
	return b.Bytes()
}

// checkLibrary returns an error unless the image is a shared library with this
// soname.
func checkLibrary(image []byte, soname string) error {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return fmt.Errorf("not a shared library: %w", err)
	}
	if names, err := f.DynString(elf.DT_SONAME); err != nil || !slices.Equal(names, []string{soname}) {
		return fmt.Errorf("not a library named %s: %v", soname, names)
	}
	return nil
}

// withPrograms returns the image of libnvidia-ml.so.1 with the path from its directory to
// that of the programs, in the place that src/forward.c of package library has for it.
func withPrograms(image []byte, path string) ([]byte, error) {
	const size = 256
	mark := []byte("NVMLSIM-PROGRAMS:")
	at := bytes.Index(image, mark)
	if at < 0 || len(image) < at+size {
		return nil, errors.New("not the simulator's library, or an old one: build it again")
	}
	if len(mark)+len(path) >= size {
		return nil, fmt.Errorf("the way from the libraries to the programs is too long: %s", path)
	}
	field := make([]byte, size)
	copy(field, append(mark, path...))
	return slices.Concat(image[:at], field, image[at+size:]), nil
}
