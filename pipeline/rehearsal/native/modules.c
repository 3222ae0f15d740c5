/* Modules: compiled kernels that Triton loads. Registers and local memory are read from the cubin, which is an ELF file. */
typedef struct { char *image; size_t size; } Module;
typedef struct { char magic[16]; uint16_t type, machine; uint32_t version; uint64_t entry, programs, sections; uint32_t flags;
                 uint16_t header, program_size, program_count, section_size, section_count, names; } ElfHeader;
typedef struct { uint32_t name, type; uint64_t flags, address, offset, size; uint32_t link, info; uint64_t alignment, entry_size; } ElfSection;

static const ElfSection *section(const char *image, int index) {
    const ElfHeader *elf = (const ElfHeader *)image;
    return (const ElfSection *)(image + elf->sections + (size_t)index * elf->section_size);
}
static const ElfSection *section_of(const char *image, const char *prefix, const char *name) {
    const ElfHeader *elf = (const ElfHeader *)image;
    const char *names = image + section(image, elf->names)->offset;
    for (int i = 0; i < elf->section_count; i++) {
        const char *found = names + section(image, i)->name;
        size_t n = strlen(prefix);
        if (!strncmp(found, prefix, n) && !strcmp(found + n, name)) return section(image, i);
    }
    return NULL;
}
/* A number of .nv.info that belongs to a kernel, which it names by an index in the table of symbols; 0 if there is none. */
enum { FRAME_BYTES = 0x11, REGISTERS = 0x2f };
static int kernel_number(const char *image, const char *name, int attribute_number) {
    const ElfSection *info = section_of(image, ".nv.info", ""), *symbols = section_of(image, ".symtab", ""), *texts = section_of(image, ".strtab", "");
    if (!info || !symbols || !texts) return 0;
    for (size_t at = 0; at + 4 <= info->size;) {
        const unsigned char *item = (const unsigned char *)image + info->offset + at;
        size_t bytes = item[0] == 4 ? item[2] | item[3] << 8 : 0; /* format 4 has a size, others two bytes of value */
        if (item[0] == 4 && item[1] == attribute_number && bytes == 8) {
            uint32_t symbol, number;
            memcpy(&symbol, item + 4, 4), memcpy(&number, item + 8, 4);
            const char *entry = image + symbols->offset + 24ul * symbol;
            uint32_t text;
            memcpy(&text, entry, 4);
            if (!strcmp(image + texts->offset + text, name)) return number;
        }
        at += 4 + bytes;
    }
    return 0;
}
static int load_module(Call *call, Module **module, const void *image) {
    if (memcmp(image, "\177ELF", 4)) return unknown(call, NOT_SUPPORTED); /* PTX or a fat binary */
    const ElfHeader *elf = image;
    size_t size = elf->sections + (size_t)elf->section_size * elf->section_count;
    for (int i = 0; i < elf->section_count; i++) {
        const ElfSection *part = section(image, i);
        if (part->type != 8 && part->offset + part->size > size) size = part->offset + part->size; /* 8: no bytes in the file */
    }
    if (elf->programs + (size_t)elf->program_size * elf->program_count > size) size = elf->programs + (size_t)elf->program_size * elf->program_count;
    *module = malloc(sizeof(Module));
    char *kept = malloc(size);
    if (!*module || !kept) return OUT_OF_MEMORY;
    memcpy(kept, image, size);
    return **module = (Module){kept, size}, 0;
}
int cuModuleLoadData(Module **module, const void *image) { COUNT("cuModuleLoadData"); return load_module(&call, module, image); }
int cuModuleLoadDataEx(Module **module, const void *image) { COUNT("cuModuleLoadDataEx"); return load_module(&call, module, image); }
int cuModuleLoad(Module **module, const char *path) {
    COUNT("cuModuleLoad");
    FILE *file = fopen(path, "rb");
    if (!file) return 301; /* no such file */
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    char *image = size > 64 ? malloc(size) : NULL;
    rewind(file);
    int code = image && fread(image, 1, size, file) == (size_t)size ? load_module(&call, module, image) : INVALID_VALUE;
    fclose(file), free(image);
    return code;
}
/* Kernels of an unloaded module stay known: a record has their names. */
int cuModuleUnload(Module *module) { COUNT("cuModuleUnload"); free(module->image), free(module); return 0; }
int cuModuleGetFunction(Function **function, const Module *module, const char *name) {
    COUNT("cuModuleGetFunction");
    const ElfSection *text = section_of(module->image, ".text.", name), *shared = section_of(module->image, ".nv.shared.", name);
    if (!text) return SYMBOL_NOT_FOUND;
    *function = register_function(NULL, strdup(name));
    (*function)->registers = kernel_number(module->image, name, REGISTERS), (*function)->shared = shared ? shared->size : 0;
    (*function)->local = kernel_number(module->image, name, FRAME_BYTES);
    return 0;
}
int cuFuncGetAttribute(int *value, int kind, const Function *function) {
    COUNT("cuFuncGetAttribute");
    switch (kind) {
    case 0: return *value = 1024, 0;
    case 1: return *value = function->shared, 0;
    case 3: return *value = function->local, 0;
    case 4: return *value = function->registers, 0;
    case 5: case 6: return *value = 10 * MAJOR + MINOR, 0;
    case 8: return *value = function->max_shared, 0;
    default: return *value = 0, 0;
    }
}
int cuFuncSetAttribute(Function *function, int kind, int value) {
    COUNT("cuFuncSetAttribute");
    if (kind == 8) function->max_shared = value;
    return 0;
}
NOTHING(cuFuncSetCacheConfig)
int cuLaunchKernel(const Function *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream) {
    COUNT("cuLaunchKernel");
    (void)shared;
    return launch(&call, f, (Dim3){x, y, z}, (Dim3){bx, by, bz}, stream);
}
int cuLaunchCooperativeKernel(const Function *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream) {
    COUNT("cuLaunchCooperativeKernel");
    (void)shared;
    return launch(&call, f, (Dim3){x, y, z}, (Dim3){bx, by, bz}, stream);
}
typedef struct { Dim3 grid, block; unsigned shared; void *stream; } DriverLaunch;
int cuLaunchKernelEx(const DriverLaunch *c, const Function *f) { COUNT("cuLaunchKernelEx"); return launch(&call, f, c->grid, c->block, c->stream); }
int cuOccupancyMaxActiveClusters(int *n, const Function *f, const void *c) {
    COUNT("cuOccupancyMaxActiveClusters");
    (void)f, (void)c;
    return *n = MULTIPROCESSORS, 0;
}
NOTHING(cuTensorMapEncodeTiled)
NOTHING(cuTensorMapEncodeIm2col)
