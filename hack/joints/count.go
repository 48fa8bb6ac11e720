package main

import (
	"go/ast"
	"go/token"
	"go/types"
	"strings"

	"golang.org/x/tools/go/packages"
	"golang.org/x/tools/go/types/typeutil"
)

// place is a joint: where it is, and its name or text.
type place struct {
	at   token.Position
	what string
}

// counter collects the joints of one kind from the files of packages.
type counter struct {
	root  string
	p     *packages.Package
	found []place
}

func (c *counter) add(n ast.Node, what string) {
	c.found = append(c.found, place{c.p.Fset.Position(n.Pos()), what})
}

// walk calls visit for each node of the packages' files, with the nodes around it, the file
// first.
func (t *tree) walk(in []*packages.Package, visit func(c *counter, n ast.Node, around []ast.Node)) []place {
	c := &counter{root: t.root}
	for _, c.p = range in {
		for _, file := range c.p.Syntax {
			ast.PreorderStack(file, nil, func(n ast.Node, around []ast.Node) bool {
				visit(c, n, around)
				return true
			})
		}
	}
	return c.found
}

// interfaces are the interfaces with methods that are declared: types with a name, and those
// written in place, as the type of a field, of a parameter, or of an assertion. Constraints, which
// are used as that alone, are none: the compiler fills them in, and no value has their type.
func (t *tree) interfaces(in []*packages.Package) []place {
	constraints := t.constraints()
	return t.walk(in, func(c *counter, n ast.Node, around []ast.Node) {
		switch n := n.(type) {
		case *ast.TypeSpec:
			of, is := c.p.TypesInfo.TypeOf(n.Name).Underlying().(*types.Interface)
			if is && !aliases(n) && isInterface(of) && !constraints[c.p.TypesInfo.Defs[n.Name]] {
				c.add(n, n.Name.Name)
			}
		case *ast.InterfaceType:
			_, named := around[len(around)-1].(*ast.TypeSpec)
			of, is := c.p.TypesInfo.TypeOf(n).(*types.Interface)
			if is && !named && !inTypeParameters(around) && isInterface(of) {
				c.add(n, "interface written in place")
			}
		}
	})
}

// aliases reports whether a declaration gives another name to a type that has one.
func aliases(n *ast.TypeSpec) bool {
	_, written := n.Type.(*ast.InterfaceType)
	return n.Assign.IsValid() && !written
}

// isInterface reports whether values can have the type, and what it asks of them.
func isInterface(t *types.Interface) bool { return t.IsMethodSet() && t.NumMethods() > 0 }

// constraints are the named types whose uses are all in lists of type parameters.
func (t *tree) constraints() map[types.Object]bool {
	constraint := map[types.Object]bool{}
	t.walk(t.behind(programs()...), func(c *counter, n ast.Node, around []ast.Node) {
		name, is := n.(*ast.Ident)
		if !is {
			return
		}
		if of, is := c.p.TypesInfo.Uses[name].(*types.TypeName); is {
			before, seen := constraint[of]
			constraint[of] = (before || !seen) && inTypeParameters(around)
		}
	})
	return constraint
}

// inTypeParameters reports whether the node with these around it is the constraint of a type
// parameter, or a part of one.
func inTypeParameters(around []ast.Node) bool {
	for i, n := range around {
		list, is := n.(*ast.FieldList)
		if !is {
			continue
		}
		switch of := around[i-1].(type) {
		case *ast.TypeSpec:
			return true // a struct's fields have the StructType around them
		case *ast.FuncType:
			if of.TypeParams == list {
				return true
			}
		}
	}
	return false
}

// functionFields are the fields of structs that hold a function, or several: the type is a
// function's, or one of a slice, an array, a map, a channel or a pointer of these, or an argument
// of a generic type. A type with a name counts if the project declares it: a context.CancelFunc
// ends something, it isn't a way around a package.
func (t *tree) functionFields(in []*packages.Package) []place {
	return t.walk(in, func(c *counter, n ast.Node, _ []ast.Node) {
		if of, is := n.(*ast.StructType); is {
			c.fields(of, c.holdsFunction)
		}
	})
}

// fields adds those fields of a struct whose type is as wanted. Names that share a type count
// each.
func (c *counter) fields(of *ast.StructType, wanted func(types.Type) bool) {
	for _, field := range of.Fields.List {
		if !wanted(c.p.TypesInfo.TypeOf(field.Type)) {
			continue
		}
		for _, name := range field.Names {
			c.add(name, name.Name+" "+types.ExprString(field.Type))
		}
		if len(field.Names) == 0 {
			c.add(field, types.ExprString(field.Type))
		}
	}
}

func (c *counter) holdsFunction(t types.Type) bool {
	return holds(t, func(t types.Type) bool {
		named, is := types.Unalias(t).(*types.Named)
		if is && !c.ours(named.Obj()) {
			return false
		}
		_, is = t.Underlying().(*types.Signature)
		return is
	})
}

// ours reports whether the project declares what has the name.
func (c *counter) ours(name types.Object) bool {
	return name.Pkg() != nil && strings.HasPrefix(name.Pkg().Path(), c.root)
}

// holds reports whether a type, one that it is made of, or an argument of it is as wanted.
func holds(t types.Type, wanted func(types.Type) bool) bool {
	if wanted(t) {
		return true
	}
	switch t := types.Unalias(t).(type) {
	case *types.Pointer:
		return holds(t.Elem(), wanted)
	case *types.Slice:
		return holds(t.Elem(), wanted)
	case *types.Array:
		return holds(t.Elem(), wanted)
	case *types.Chan:
		return holds(t.Elem(), wanted)
	case *types.Map:
		return holds(t.Elem(), wanted)
	case *types.Named:
		for argument := range t.TypeArgs().Types() {
			if holds(argument, wanted) {
				return true
			}
		}
	}
	return false
}

// locks are the fields and variables that are a lock, or several, and the calls that lock a file.
// A lock is what has a method Lock: sync.Mutex, sync.RWMutex, and the types of the project that
// have one, as keylock.Locks. An embedded lock counts as a field.
func (t *tree) locks(in []*packages.Package) []place {
	return t.walk(in, func(c *counter, n ast.Node, _ []ast.Node) {
		switch n := n.(type) {
		case *ast.StructType:
			c.fields(n, c.holdsLock)
		case *ast.ValueSpec:
			for _, name := range n.Names {
				c.lockVariable(name)
			}
		case *ast.AssignStmt:
			for i, right := range n.Rhs {
				if name, is := n.Lhs[i].(*ast.Ident); is && c.makes(right) {
					c.lockVariable(name)
				}
			}
		case *ast.CallExpr:
			if f := c.called(n); f != nil && (f.Name() == "Flock" || f.Name() == "FcntlFlock") {
				c.add(n, f.FullName())
			}
		}
	})
}

func (c *counter) lockVariable(name *ast.Ident) {
	if of := c.p.TypesInfo.Defs[name]; of != nil && c.holdsLock(of.Type()) {
		c.add(name, name.Name+" "+types.TypeString(of.Type(), types.RelativeTo(c.p.Types)))
	}
}

// makes reports whether an expression makes a value; others copy or point to one that is there.
func (c *counter) makes(e ast.Expr) bool {
	switch e := ast.Unparen(e).(type) {
	case *ast.CompositeLit:
		return true
	case *ast.UnaryExpr:
		return c.makes(e.X)
	case *ast.CallExpr:
		of, is := e.Fun.(*ast.Ident)
		if !is {
			return false
		}
		_, is = c.p.TypesInfo.Uses[of].(*types.Builtin)
		return is && (of.Name == "new" || of.Name == "make")
	}
	return false
}

func (c *counter) holdsLock(t types.Type) bool {
	return holds(t, func(t types.Type) bool {
		named, is := types.Unalias(t).(*types.Named)
		if !is || named.Obj().Pkg() == nil || named.Obj().Pkg().Path() != "sync" && !c.ours(named.Obj()) {
			return false
		}
		method, _, _ := types.LookupFieldOrMethod(named, true, named.Obj().Pkg(), "Lock")
		_, is = method.(*types.Func)
		return is
	})
}

// called returns the function or method that is called; nil if that is the value of a variable, or
// a conversion.
func (c *counter) called(call *ast.CallExpr) *types.Func {
	f, _ := typeutil.Callee(c.p.TypesInfo, call).(*types.Func)
	return f
}

// goroutines are the places that start a goroutine: go statements, the methods Go of errgroup.Group
// and sync.WaitGroup, those of wait.Group that start, and AfterFunc of time and context.
func (t *tree) goroutines(in []*packages.Package) []place {
	return t.walk(in, func(c *counter, n ast.Node, _ []ast.Node) {
		switch n := n.(type) {
		case *ast.GoStmt:
			c.add(n, "go")
		case *ast.CallExpr:
			if f := c.called(n); f != nil && starts(f.FullName()) {
				c.add(n, f.FullName())
			}
		}
	})
}

func starts(function string) bool {
	switch function {
	case "(*sync.WaitGroup).Go", "(*golang.org/x/sync/errgroup.Group).Go", "(*golang.org/x/sync/errgroup.Group).TryGo",
		"(*k8s.io/apimachinery/pkg/util/wait.Group).Start", "(*k8s.io/apimachinery/pkg/util/wait.Group).StartWithChannel",
		"(*k8s.io/apimachinery/pkg/util/wait.Group).StartWithContext", "context.AfterFunc", "time.AfterFunc":
		return true
	}
	return false
}
