package driverroot

import (
	"path/filepath"
	"slices"
	"strings"
)

// place is where a platform has the driver's libraries, and the programs that belong to them,
// if these are in another tree or in no usual directory. Both are directories of the host, or
// of a driver root.
type place struct {
	libraries, programs string
}

// places returns those of all known platforms. Later ones are searched only if the earlier
// ones have no library; all that have the library that was found are searched for programs.
func places() []place {
	return []place{
		// Bottlerocket since bottlerocket-kernel-kit PR 425 (driver 580) and PR 473 (595); its
		// programs are in /usr/bin since 1.35. Arch and openSUSE, which have them there too.
		{"/usr/lib", "/usr/libexec/nvidia/tesla/bin"},
		// Bottlerocket before these.
		{"/usr/lib/nvidia/tesla", "/usr/libexec/nvidia/tesla/bin"},
		// NVIDIA's images, and installers that follow them.
		{"/usr/local/nvidia/lib64", "/usr/local/nvidia/bin"},
		{"/usr/local/nvidia/lib", "/usr/local/nvidia/bin"},
		// Talos up to 1.12 (siderolabs/extensions, nvidia-gpu): the driver needs glibc, and Talos has musl.
		{"/usr/local/glibc/usr/lib", "/usr/local/bin"},
		// Talos from 1.13 (nvidia-container-toolkit PR 1621).
		{"/usr/local/lib", "/usr/local/bin"},
		// NixOS (nixpkgs, nixos/modules/hardware/graphics.nix; its issue 288037). Both are links
		// into /nix/store.
		{"/run/opengl-driver/lib", "/run/current-system/sw/bin"},
		// WSL (Microsoft's documentation of CUDA there): the host's driver is mounted there.
		{"/usr/lib/wsl/lib", "/usr/lib/wsl/lib"},
		// AKS with Ubuntu (Azure/AgentBaker, cse_install_ubuntu.sh).
		{"/usr/bin/lib64", "/usr/bin"},
		// GKE with Ubuntu (container-engine-accelerators, nvidia-driver-installer).
		{"/opt/nvidia/lib64", "/opt/nvidia/bin"},
		// Flatcar (flatcar/scripts, nvidia-drivers): current is a link to the version for the kernel.
		{"/opt/nvidia/current/usr/lib64", "/opt/nvidia/current/usr/bin"},
		// A tree without /usr.
		{"/lib", "/bin"},
	}
}

// libraryDirs returns the directories of places in a driver root: those below it, and those of
// the host that lie in it.
func libraryDirs(root string) []string {
	var dirs []string
	for _, p := range places() {
		dirs = append(dirs, filepath.Join(root, p.libraries))
		if strings.HasPrefix(p.libraries, root+"/") {
			dirs = append(dirs, p.libraries)
		}
	}
	return unique(dirs)
}

// placeProgramDirs returns the program directories of the places that have the library, with
// the places' directories below root.
func placeProgramDirs(root, libraryPath string) []string {
	var dirs []string
	for _, p := range places() {
		found, err := filepath.EvalSymlinks(filepath.Join(root, p.libraries, library))
		if err == nil && found == libraryPath {
			dirs = append(dirs, filepath.Join(root, p.programs))
		}
	}
	return dirs
}

// unique drops repetitions, and keeps the order.
func unique(dirs []string) []string {
	var once []string
	for _, dir := range dirs {
		if !slices.Contains(once, dir) {
			once = append(once, dir)
		}
	}
	return once
}
