package driverroot

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
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

// nameLibrary gives a shared object its soname where the linker gave it none:
// the name must be among its dynamic strings (as a symbol's), and one of the
// spare entries at the end of its dynamic section is used.
func nameLibrary(image []byte, soname string) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return nil, fmt.Errorf("not a shared library: %w", err)
	}
	if f.Type != elf.ET_DYN || f.Class != elf.ELFCLASS64 || f.ByteOrder != binary.LittleEndian {
		return nil, errors.New("not a 64-bit little-endian shared library")
	}
	if names, err := f.DynString(elf.DT_SONAME); err == nil && len(names) > 0 {
		if names[0] != soname {
			return nil, fmt.Errorf("its soname is %q, not %q", names[0], soname)
		}
		return image, nil
	}
	dynamic, strings := f.Section(".dynamic"), f.Section(".dynstr")
	if dynamic == nil || strings == nil {
		return nil, errors.New("it has no dynamic section")
	}
	table, err := strings.Data()
	if err != nil {
		return nil, err
	}
	at := bytes.Index(table, []byte("\x00"+soname+"\x00"))
	if at < 0 {
		return nil, fmt.Errorf("%q is not among its strings: not the simulator's library", soname)
	}
	return insertDynamic(image, dynamic, elf.Dyn64{Tag: int64(elf.DT_SONAME), Val: uint64(at + 1)})
}

func insertDynamic(image []byte, dynamic *elf.Section, entry elf.Dyn64) ([]byte, error) {
	out := bytes.Clone(image)
	section := out[dynamic.Offset : dynamic.Offset+dynamic.FileSize]
	for len(section) >= 32 {
		if binary.LittleEndian.Uint64(section) == uint64(elf.DT_NULL) {
			binary.LittleEndian.PutUint64(section, uint64(entry.Tag))
			binary.LittleEndian.PutUint64(section[8:], entry.Val)
			return out, nil
		}
		section = section[16:]
	}
	return nil, errors.New("its dynamic section has no spare entry")
}
