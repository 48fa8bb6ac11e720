// Package cdihook is the form in which CDI specifications ask cmd/cdi-hook to run several hooks in
// one process. Whoever writes specifications needn't know what a hook does, and the hook program,
// which runs before each container, doesn't link what writes them.
package cdihook

import "slices"

// separator stands between two hooks. No hook has such an argument. To NVIDIA's own program, which
// runs the first hook alone, it ends the flags: it would refuse those of other hooks.
const separator = "--"

// Join returns the arguments, with the program's name first, that run the hooks of both in their
// order. Both begin with the program's name; the second one's is dropped.
func Join(args, more []string) []string {
	if len(more) == 0 {
		return args
	}
	return slices.Concat(args, []string{separator}, more[1:])
}

// Split returns the hooks that arguments ask for, each with its own arguments and without the
// program's name. Arguments of a single hook, as NVIDIA's own program has them, are one.
func Split(args []string) [][]string {
	if len(args) > 0 {
		args = args[1:]
	}
	hooks := [][]string{nil}
	for _, arg := range args {
		if arg == separator {
			hooks = append(hooks, nil)
			continue
		}
		last := len(hooks) - 1
		hooks[last] = append(hooks[last], arg)
	}
	return hooks
}
