// A fake NVRTC that compiles kernels with the host compiler, with device.h included first.
//
// An image is "FAKE " and the path of a shared object. Objects are cached in a folder by the hash of their source.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum Code { SUCCESS = 0, INVALID_INPUT = 3, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
    std::string source, image, log;
};

std::mutex lock;
std::string folder, header, compiler = "g++";

std::string read(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

uint64_t hash(const std::string& text) {
    uint64_t value = 0xcbf29ce484222325ull;
    for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3ull;
    return value;
}

// Strips `__global__` from the source, and appends an entry point for each kernel.
std::string translated(const std::string& source, const std::string& macros) {
    const std::string word = "__global__ void ";
    std::string text = "#include \"" + header + "\"\n" + macros, tail;
    size_t from = 0;
    for (size_t at; (at = source.find(word, from)) != std::string::npos; from = at + word.size()) {
        size_t end = source.find('(', at);
        std::string name = source.substr(at + word.size(), end - at - word.size());
        text += source.substr(from, at - from) + "void ";
        tail += "FAKE_KERNEL(" + name + ")\n";
    }
    return text + source.substr(from) + "\n" + tail;
}

}  // namespace

extern "C" {

// Sets the folder of objects, the path of device.h, and the host compiler.
void fake_nvrtc_setup(const char* objects, const char* device_header, const char* host_compiler) {
    std::lock_guard<std::mutex> guard(lock);
    folder = objects;
    header = device_header;
    compiler = host_compiler;
}

int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }

const char* nvrtcGetErrorString(int) { return "the fake could not compile it"; }

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    *program = new Program{source, "", ""};
    return SUCCESS;
}

int nvrtcDestroyProgram(void** program) {
    delete static_cast<Program*>(*program);
    return SUCCESS;
}

int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    auto* program = static_cast<Program*>(handle);
    std::string macros;
    bool has_architecture = false, keeps_products = false;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        if (option.rfind("--define-macro=", 0) == 0) {
            std::string macro = option.substr(15);
            macro[macro.find('=')] = ' ';
            macros += "#define " + macro + "\n";
        } else if (option.rfind("--gpu-architecture=sm_", 0) == 0) {
            has_architecture = true;
        } else if (option == "--fmad=false") {
            keeps_products = true;
        } else if (option != "--std=c++17" && option != "--device-as-default-execution-space") {
            return INVALID_OPTION;
        }
    }
    if (!has_architecture) return INVALID_OPTION;
    std::string source = translated(program->source, macros);
    // A fortified longjmp refuses to jump to another stack.
    std::string flags = " -std=c++17 -O1 -U_FORTIFY_SOURCE -shared -fPIC -fno-strict-aliasing -w";
    flags += keeps_products ? " -ffp-contract=off" : " -ffp-contract=fast";
    char name[32];
    snprintf(name, sizeof name, "/%016llx", (unsigned long long)hash(source + flags + read(header)));
    std::string object = folder + name + ".so";
    if (access(object.c_str(), R_OK) != 0) {
        std::string own = folder + name + "-" + std::to_string(getpid()) + "-" + std::to_string((uint64_t)program);
        std::ofstream(own + ".cpp") << source;
        std::string command = compiler + flags + " -o " + own + ".so " + own + ".cpp 2> " + own + ".log";
        int failed = system(command.c_str());
        program->log = read(own + ".log");
        unlink((own + ".log").c_str());
        if (failed) return COMPILATION;
        unlink((own + ".cpp").c_str());
        rename((own + ".so").c_str(), object.c_str());
    }
    program->image = "FAKE " + object;
    return SUCCESS;
}

int nvrtcGetCUBINSize(void* program, size_t* size) {
    *size = static_cast<Program*>(program)->image.size() + 1;
    return SUCCESS;
}

int nvrtcGetCUBIN(void* program, char* image) {
    strcpy(image, static_cast<Program*>(program)->image.c_str());
    return SUCCESS;
}

int nvrtcGetProgramLogSize(void* program, size_t* size) {
    *size = static_cast<Program*>(program)->log.size() + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(void* program, char* log) {
    strcpy(log, static_cast<Program*>(program)->log.c_str());
    return SUCCESS;
}

}  // extern "C"
